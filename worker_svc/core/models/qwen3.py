"""Qwen3 (Qwen team, 2025): Llama with each head's query and key normalised before it is rotated."""

from worker_svc.core.models.config_fields import ConfigFields
from worker_svc.core.models.parts import attention, decoder, gated_mlp, head_norms, pre_norm
from worker_svc.core.models.spec import DecoderSpec, SublayerSpec

_HEAD_DIM = 128  # where the configuration leaves it out


def qwen3(fields: ConfigFields) -> DecoderSpec:
    """One norm weight of head_dim for all query heads of a layer, one for all key heads."""
    has_bias = fields.flag("attention_bias")

    def layer(number: int) -> tuple[SublayerSpec, ...]:
        attend = attention(
            fields,
            number,
            head_dim=fields.count("head_dim", _HEAD_DIM),
            has_bias=has_bias,
            has_output_bias=has_bias,
            window=fields.window_of_last_layers(number),
            **head_norms(fields, number),
        )
        return pre_norm(fields, number, attend, gated_mlp(fields, number))

    return decoder(fields, layer)
