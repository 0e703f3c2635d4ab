"""OLMo 2 (Ai2, 2024): what a block gives is normalised, not what it reads; queries and keys are, over all heads."""

from worker_svc.core.models.config_fields import ConfigFields
from worker_svc.core.models.parts import attention, decoder, gated_mlp, head_norms, norm
from worker_svc.core.models.spec import DecoderSpec, SublayerSpec


def olmo2(fields: ConfigFields) -> DecoderSpec:
    """Biases are all of a kind or none."""
    has_bias = fields.flag("attention_bias")

    def layer(number: int) -> tuple[SublayerSpec, ...]:
        name = f"model.layers.{number}"
        attend = attention(
            fields,
            number,
            has_bias=has_bias,
            has_output_bias=has_bias,
            norms_all_heads=True,
            **head_norms(fields, number),
        )
        return (
            SublayerSpec(attend, None, norm(fields, f"{name}.post_attention_layernorm")),
            SublayerSpec(gated_mlp(fields, number), None, norm(fields, f"{name}.post_feedforward_layernorm")),
        )

    return decoder(fields, layer)
