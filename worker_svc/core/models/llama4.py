"""Llama 4 (Meta, 2025), its text: most layers are rotated and attend within chunks, others attend to all with queries
that grow with their position; experts weigh what they are given.
"""

from typing import Any

from contract.domain.errors import unimplemented
from worker_svc.core.models.config_fields import CHUNKED, ConfigFields
from worker_svc.core.models.parts import attention, decoder, experts, gated_mlp, listed_layers, pre_norm, rotated_layers
from worker_svc.core.models.spec import DecoderSpec, GatedMLPSpec, NormSpec, StoredRows, SublayerSpec, TemperatureSpec


def llama4(fields: ConfigFields) -> DecoderSpec:
    """Heads are normalised without weights: before they are rotated they give the same as after it."""
    rope, chunk = fields.rope(theta=500_000.0, is_paired=True), fields.count_or_none("attention_chunk_size", 8192)
    head_norm, has_bias = NormSpec(None, fields.positive("rms_norm_eps", 1e-5)), fields.flag("attention_bias")
    of_rotated: dict[str, Any] = {"rope": rope}
    if fields.flag("use_qk_norm", default=True):
        of_rotated |= {"query_norm": head_norm, "key_norm": head_norm}
        if rope.attention_factor != 1.0:
            raise unimplemented(f"norms of heads (use_qk_norm) after a rotation of the type {rope.rope_type}")
    temperature = TemperatureSpec(fields.count("floor_scale", 8192), fields.positive("attn_scale", 0.1))
    is_tempered = fields.get("attn_temperature_tuning") not in (False, 0)  # some say 4
    of_others: dict[str, Any] = {"rope": None, "temperature": temperature if is_tempered else None}
    turns, mixtures = rotated_layers(fields), listed_layers(fields, "moe_layers")
    step, sizes = fields.count("interleave_moe_layer_step", 1), ("intermediate_size", "intermediate_size_mlp")
    (size, dense_size), count = map(fields.count, sizes), fields.count("num_local_experts")

    def layer(number: int) -> tuple[SublayerSpec, ...]:
        is_local = fields.layer_type(number, lambda each: bool(turns[each]), local=CHUNKED) == CHUNKED
        of_layer = {"chunk": chunk if is_local else None, **(of_rotated if turns[number] else of_others)}
        attend = attention(fields, number, has_bias=has_bias, has_output_bias=has_bias, **of_layer)
        at, name = "feed_forward", f"model.layers.{number}.feed_forward"
        if (number + 1) % step if mixtures is None else number not in mixtures:
            return pre_norm(fields, number, attend, gated_mlp(fields, number, at=at, size=dense_size))
        both, down = f"{name}.experts.gate_up_proj", StoredRows(f"{name}.experts.down_proj")
        each = GatedMLPSpec(size, StoredRows(both, 0, 2 * size), StoredRows(both, size, 2 * size), down)
        router = {"name": f"{name}.router", "score": "sigmoid", "weighs_inputs": True}
        changes: dict[str, Any] = {"shared": gated_mlp(fields, number, at=f"{at}.shared_expert"), "router": router}
        mixture = experts(fields, number, count=count, size=size, each=each, layout="transposed", **changes)
        return pre_norm(fields, number, attend, mixture)

    return decoder(fields, layer)
