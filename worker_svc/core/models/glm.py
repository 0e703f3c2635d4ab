"""GLM-4-9B (Zhipu, 2024) and GLM-4-0414, GLM-Z1 (2025): half of each head's dimensions turn, as neighbours."""

from collections.abc import Callable

from worker_svc.core.models.config_fields import ConfigFields
from worker_svc.core.models.parts import attention, decoder, gated_mlp, packed_gate_up, pre_norm, sandwich
from worker_svc.core.models.spec import AttentionSpec, DecoderSpec, SublayerSpec

_HEAD_DIM = 128  # where the configuration leaves it out


def glm(fields: ConfigFields) -> DecoderSpec:
    """Norms before each block."""
    attend = _attention_of(fields, has_bias=fields.flag("attention_bias", default=True))
    return decoder(
        fields,
        lambda number: pre_norm(
            fields, number, attend(number), gated_mlp(fields, number, **packed_gate_up(fields, number))
        ),
    )


def glm4(fields: ConfigFields) -> DecoderSpec:
    """Norms before and after each block."""
    attend = _attention_of(fields, has_bias=fields.flag("attention_bias"))
    names = "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"

    def layer(number: int) -> tuple[SublayerSpec, ...]:
        mlp = gated_mlp(fields, number, **packed_gate_up(fields, number))
        return sandwich(fields, number, attend(number), mlp, names)

    return decoder(fields, layer)


def _attention_of(fields: ConfigFields, *, has_bias: bool) -> Callable[[int], AttentionSpec]:
    head_dim = fields.count("head_dim", _HEAD_DIM)
    rope = fields.rope(head_dim=head_dim, partial_rotary_factor=0.5, is_paired=True)
    return lambda number: attention(fields, number, head_dim=head_dim, rope=rope, has_bias=has_bias)
