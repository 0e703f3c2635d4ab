"""Qwen1.5-MoE and Qwen2-57B-A14B (Qwen team, 2024): Qwen2 with small experts, and a gated one that all tokens share."""

from worker_svc.core.models.config_fields import SLIDING, ConfigFields
from worker_svc.core.models.parts import attention, decoder, experts, gated_mlp, has_experts, pre_norm
from worker_svc.core.models.spec import DecoderSpec, SublayerSpec

_MOST_WINDOW_LAYERS = 28  # where the configuration leaves it out


def qwen2_moe(fields: ConfigFields) -> DecoderSpec:
    """Windows, where they are used and not listed, are those of every other of the first layers."""
    has_bias, uses_windows = fields.flag("qkv_bias", default=True), fields.flag("use_sliding_window")
    most = fields.count("max_window_layers", _MOST_WINDOW_LAYERS)
    count, size = fields.count("num_experts"), fields.count("moe_intermediate_size")
    shared_size = fields.count("shared_expert_intermediate_size")
    router = {"renormalizes": fields.flag("norm_topk_prob")}

    def layer(number: int) -> tuple[SublayerSpec, ...]:
        layer_type = fields.layer_type(number, lambda each: uses_windows and each % 2 == 0 and each < most)
        window = fields.window(number, is_used=layer_type == SLIDING)
        attend = attention(fields, number, has_bias=has_bias, window=window)
        dense = gated_mlp(fields, number)
        if not has_experts(fields, number):
            return pre_norm(fields, number, attend, dense)
        mixture = experts(
            fields,
            number,
            count=count,
            size=size,
            router=router,
            shared=gated_mlp(fields, number, at="mlp.shared_expert", size=shared_size),
            shared_gate=f"model.layers.{number}.mlp.shared_expert_gate",
        )
        return pre_norm(fields, number, attend, mixture)

    return decoder(fields, layer)
