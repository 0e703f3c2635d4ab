"""SmolLM3 (Hugging Face, 2025): Llama of which one layer in four is not rotated."""

from worker_svc.core.models.config_fields import ConfigFields
from worker_svc.core.models.parts import attention, decoder, gated_mlp, pre_norm, rotated_layers
from worker_svc.core.models.spec import DecoderSpec, SublayerSpec


def smollm3(fields: ConfigFields) -> DecoderSpec:
    """Windows, where they are used, are those of layers by their types or, without these, of what is not rotated."""
    has_bias, mlp_has_bias = fields.flag("attention_bias"), fields.flag("mlp_bias")
    rope, has_windows, turns = fields.rope(theta=2e6), fields.flag("use_sliding_window"), rotated_layers(fields)

    def layer(number: int) -> tuple[SublayerSpec, ...]:
        attend = attention(
            fields,
            number,
            rope=rope if turns[number] else None,
            has_bias=has_bias,
            has_output_bias=has_bias,
            window=fields.window(number, is_used=not turns[number]) if has_windows else None,
        )
        return pre_norm(fields, number, attend, gated_mlp(fields, number, has_bias=mlp_has_bias))

    fields.get("layer_types")  # without windows all are full
    for field in ("sliding_window", "max_window_layers"):
        fields.get(field)
    return decoder(fields, layer, ties_by_default=True)
