"""EXAONE 4 (LG, 2025): heads are normalised, and what blocks give; layers without a window are not rotated."""

from worker_svc.core.models.config_fields import SLIDING, ConfigFields
from worker_svc.core.models.parts import attention, decoder, gated_mlp, head_norms, norm
from worker_svc.core.models.spec import AttentionSpec, DecoderSpec, SublayerSpec


def exaone4(fields: ConfigFields) -> DecoderSpec:
    """Small models have no windows, and all layers are rotated."""
    window, rope = fields.get("sliding_window"), fields.rope()
    pattern = fields.get("sliding_window_pattern")
    fields.must_be("reorder_qk_norm", "norms after blocks being", True)
    fields.get("max_window_layers")  # windows are those of `layer_types`
    # "LLLG": three local layers and a global one.
    period = len(pattern) if isinstance(pattern, str) else pattern or 4

    def attend(number: int) -> AttentionSpec:
        plain = attention(fields, number, rope=rope, **head_norms(fields, number))
        if window is None:
            fields.get("layer_types")
            return plain
        is_local = fields.layer_type(number, lambda each: bool((each + 1) % period)) == SLIDING
        of_type = {"window": fields.count("sliding_window")} if is_local else {"rope": None}
        return attention(fields, number, **{"rope": rope, **of_type}, **head_norms(fields, number))

    def layer(number: int) -> tuple[SublayerSpec, ...]:
        name = f"model.layers.{number}"
        return (
            SublayerSpec((attend(number),), None, norm(fields, f"{name}.post_attention_layernorm")),
            SublayerSpec((gated_mlp(fields, number),), None, norm(fields, f"{name}.post_feedforward_layernorm")),
        )

    return decoder(fields, layer)
