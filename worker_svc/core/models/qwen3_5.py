"""Qwen3.5 (Qwen team, 2026), its text, dense or of experts: Qwen3-Next whose products are stored one by one."""

from collections.abc import Callable

from worker_svc.core.models.config_fields import ConfigFields
from worker_svc.core.models.hybrid import AHEAD, OFFSET, hybrid_layer, shared_mixture
from worker_svc.core.models.parts import decoder, gated_mlp, norm
from worker_svc.core.models.spec import DecoderSpec, ExpertsSpec, GatedMLPSpec, SublayerSpec


def qwen3_5(fields: ConfigFields) -> DecoderSpec:
    """A dense block in every layer."""
    return _decoder(fields, lambda number: gated_mlp(fields, number))


def qwen3_5_moe(fields: ConfigFields) -> DecoderSpec:
    """Experts in every layer, whose weights sum to one."""
    fields.get("intermediate_size")  # some have it, of no block
    return _decoder(fields, lambda number: shared_mixture(fields, number, renormalizes=True))


def _decoder(fields: ConfigFields, make_mlp: Callable[[int], GatedMLPSpec | ExpertsSpec]) -> DecoderSpec:
    fields.must_be("attn_output_gate", "attention without gates of its outputs", True)
    fields.must_be("mamba_ssm_dtype", "states of the delta rule in", "float32")
    for field in ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"):  # of layers that are left out
        fields.get(field)

    def layer(number: int) -> tuple[SublayerSpec, ...]:
        return hybrid_layer(fields, number, make_mlp(number), are_together=False)

    return decoder(fields, layer, norm=norm(fields, "model.norm", offset=OFFSET), unused_prefixes=AHEAD)
