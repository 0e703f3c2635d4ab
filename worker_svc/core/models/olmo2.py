"""OLMo 2 (Ai2, 2024) and OLMo 3 (2025): what a block gives is normalised, not what it reads; queries and keys are, over
all heads.
"""

from typing import Any

from worker_svc.core.models.config_fields import FULL, SLIDING, ConfigFields
from worker_svc.core.models.parts import attention, decoder, gated_mlp, head_norms, norm
from worker_svc.core.models.spec import DecoderSpec, SublayerSpec


def olmo2(fields: ConfigFields) -> DecoderSpec:
    """All layers alike."""
    rope = fields.rope()
    return decoder(fields, lambda number: _layer(fields, number, rope=rope))


def olmo3(fields: ConfigFields) -> DecoderSpec:
    """Three of four layers attend within a window; a rotation that is stretched is that of the others alone."""
    theta = fields.positive("rope_theta", 500_000.0)

    def layer(number: int) -> tuple[SublayerSpec, ...]:
        layer_type = fields.layer_type(number, lambda each: bool((each + 1) % 4)) or FULL
        rope = fields.rope_of_type(layer_type, local_theta=theta, theta=theta)
        window = fields.count("sliding_window", 4096) if layer_type == SLIDING else None
        return _layer(fields, number, rope=rope, window=window)

    return decoder(fields, layer)


def _layer(fields: ConfigFields, number: int, **changes: Any) -> tuple[SublayerSpec, ...]:
    """Biases are all of a kind or none."""
    has_bias, name = fields.flag("attention_bias"), f"model.layers.{number}"
    attend = attention(
        fields,
        number,
        has_bias=has_bias,
        has_output_bias=has_bias,
        norms_all_heads=True,
        **head_norms(fields, number),
        **changes,
    )
    return (
        SublayerSpec((attend,), None, norm(fields, f"{name}.post_attention_layernorm")),
        SublayerSpec((gated_mlp(fields, number),), None, norm(fields, f"{name}.post_feedforward_layernorm")),
    )
