"""Qwen2 and Qwen2.5 (Qwen team, 2024): Llama with biases of queries, keys and values, in every checkpoint."""

from worker_svc.core.models.config_fields import ConfigFields
from worker_svc.core.models.parts import attention, decoder, gated_mlp, pre_norm
from worker_svc.core.models.spec import DecoderSpec, SublayerSpec


def qwen2(fields: ConfigFields) -> DecoderSpec:
    """Windows, where they are used, are those of the last layers."""

    def layer(number: int) -> tuple[SublayerSpec, ...]:
        attend = attention(fields, number, has_bias=True, window=fields.window_of_last_layers(number))
        return pre_norm(fields, number, attend, gated_mlp(fields, number))

    return decoder(fields, layer)
