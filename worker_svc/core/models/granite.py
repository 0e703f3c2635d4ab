"""Granite 3 (IBM, 2024): Llama with multipliers of embedding, scores, residuals and logits (Yang et al., 2022)."""

from collections.abc import Callable
from typing import Any

from worker_svc.core.models.config_fields import ConfigFields
from worker_svc.core.models.parts import attention, decoder, gated_mlp, pre_norm
from worker_svc.core.models.spec import DecoderSpec, ExpertsSpec, GatedMLPSpec, SublayerSpec


def granite(fields: ConfigFields) -> DecoderSpec:
    """Dense layers."""
    mlp_has_bias = fields.flag("mlp_bias")
    return granite_decoder(fields, lambda number: gated_mlp(fields, number, has_bias=mlp_has_bias))


def granite_decoder(
    fields: ConfigFields, make_mlp: Callable[[int], GatedMLPSpec | ExpertsSpec], **of_attention: Any
) -> DecoderSpec:
    """With what is made for each layer, and changes of its attention; multipliers are one where the configuration
    leaves them out.
    """
    has_bias = fields.flag("attention_bias")
    of_scores = fields.positive("attention_multiplier", 1.0)
    of_residuals = fields.positive("residual_multiplier", 1.0)

    def layer(number: int) -> tuple[SublayerSpec, ...]:
        attend = attention(fields, number, has_bias=has_bias, has_output_bias=has_bias, scale=of_scores, **of_attention)
        return pre_norm(fields, number, attend, make_mlp(number), scale=of_residuals)

    return decoder(
        fields,
        layer,
        embedding_scale=fields.positive("embedding_multiplier", 1.0),
        logits_scale=1.0 / fields.positive("logits_scaling", 1.0),
    )
