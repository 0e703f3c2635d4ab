"""Granite 3 (IBM, 2024): Llama with multipliers of embedding, scores, residuals and logits (Yang et al., 2022)."""

from worker_svc.core.models.config_fields import ConfigFields
from worker_svc.core.models.parts import attention, decoder, gated_mlp, pre_norm
from worker_svc.core.models.spec import DecoderSpec, SublayerSpec


def granite(fields: ConfigFields) -> DecoderSpec:
    """Multipliers are one where the configuration leaves them out."""
    has_bias, mlp_has_bias = fields.flag("attention_bias"), fields.flag("mlp_bias")
    of_scores = fields.positive("attention_multiplier", 1.0)
    of_residuals = fields.positive("residual_multiplier", 1.0)

    def layer(number: int) -> tuple[SublayerSpec, ...]:
        attend = attention(fields, number, has_bias=has_bias, has_output_bias=has_bias, scale=of_scores)
        mlp = gated_mlp(fields, number, has_bias=mlp_has_bias)
        return pre_norm(fields, number, attend, mlp, scale=of_residuals)

    return decoder(
        fields,
        layer,
        embedding_scale=fields.positive("embedding_multiplier", 1.0),
        logits_scale=1.0 / fields.positive("logits_scaling", 1.0),
    )
