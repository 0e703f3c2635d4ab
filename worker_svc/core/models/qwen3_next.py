"""Qwen3-Next (Qwen team, 2025): three of four layers keep a state by the gated delta rule, the others attend with gated
outputs; many small experts, and a gated one that all tokens share.
"""

from worker_svc.core.models.config_fields import ConfigFields
from worker_svc.core.models.hybrid import AHEAD, OFFSET, hybrid_layer, shared_mixture
from worker_svc.core.models.parts import decoder, gated_mlp, has_experts, norm
from worker_svc.core.models.spec import DecoderSpec, SublayerSpec


def qwen3_next(fields: ConfigFields) -> DecoderSpec:
    """The rows of a key head stand beside those of its values in the products of the delta rule."""
    renormalizes = fields.flag("norm_topk_prob", default=True)

    def layer(number: int) -> tuple[SublayerSpec, ...]:
        dense, mixture = gated_mlp(fields, number), shared_mixture(fields, number, renormalizes=renormalizes)
        mlp = mixture if has_experts(fields, number) else dense
        return hybrid_layer(fields, number, mlp, are_together=True)

    return decoder(fields, layer, norm=norm(fields, "model.norm", offset=OFFSET), unused_prefixes=AHEAD)
