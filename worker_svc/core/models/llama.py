"""Llama (Touvron et al., 2023; Llama 3, 2024): pre-norm decoder, grouped-query attention, rotary embedding, SwiGLU."""

from worker_svc.core.models.config_fields import ConfigFields
from worker_svc.core.models.parts import attention, decoder, gated_mlp, pre_norm
from worker_svc.core.models.spec import DecoderSpec, SublayerSpec


def llama(fields: ConfigFields) -> DecoderSpec:
    """Biases are all of a kind or none."""
    has_bias, mlp_has_bias = fields.flag("attention_bias"), fields.flag("mlp_bias")

    def layer(number: int) -> tuple[SublayerSpec, ...]:
        attend = attention(fields, number, has_bias=has_bias, has_output_bias=has_bias)
        return pre_norm(fields, number, attend, gated_mlp(fields, number, has_bias=mlp_has_bias))

    return decoder(fields, layer)
