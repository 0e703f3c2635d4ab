"""Qwen3-30B-A3B and Qwen3-235B-A22B (Qwen team, 2025): Qwen3 with many small experts, none of them shared."""

from worker_svc.core.models.config_fields import ConfigFields
from worker_svc.core.models.parts import attention, decoder, experts, gated_mlp, has_experts, head_norms, pre_norm
from worker_svc.core.models.spec import DecoderSpec, SublayerSpec


def qwen3_moe(fields: ConfigFields) -> DecoderSpec:
    """A window, where it is used, is that of all layers."""
    has_bias, has_window = fields.flag("attention_bias"), fields.flag("use_sliding_window")
    fields.get("max_window_layers")  # has no say in it, in transformers either
    # Published files have the first, transformers 5 writes the second.
    count = fields.count("num_experts" if fields.get("num_experts") is not None else "num_local_experts")
    size = fields.count("moe_intermediate_size")
    router = {"renormalizes": fields.flag("norm_topk_prob")}

    def layer(number: int) -> tuple[SublayerSpec, ...]:
        attend = attention(
            fields,
            number,
            has_bias=has_bias,
            has_output_bias=has_bias,
            window=fields.window(number, is_used=has_window),
            **head_norms(fields, number),
        )
        dense = gated_mlp(fields, number)
        if not has_experts(fields, number):
            return pre_norm(fields, number, attend, dense)
        return pre_norm(fields, number, attend, experts(fields, number, count=count, size=size, router=router))

    return decoder(fields, layer)
