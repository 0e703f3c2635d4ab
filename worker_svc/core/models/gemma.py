"""Gemma (Google, 2024), Gemma 2 (2024) and Gemma 3 (2025): GELU gates, norms of one more than their weights, scaled
embeddings; from Gemma 2 on also norms after each block, and windows in some layers.
"""

from collections.abc import Callable

from worker_svc.core.models.config_fields import FULL, SLIDING, ConfigFields
from worker_svc.core.models.parts import attention, decoder, gated_mlp, head_norms, norm, pre_norm, sandwich
from worker_svc.core.models.spec import AttentionSpec, DecoderSpec, GatedMLPSpec, SublayerSpec

_GELU = "gelu", "gelu_pytorch_tanh"  # the first name stands in old checkpoints for the second
_LOCAL_THETA = 10000.0


def gemma(fields: ConfigFields) -> DecoderSpec:
    """Without what came later."""

    def layer(number: int) -> tuple[SublayerSpec, ...]:
        return pre_norm(fields, number, attention(fields, number), _mlp(fields, number), offset=1.0)

    return _decoder(fields, layer)


def gemma2(fields: ConfigFields) -> DecoderSpec:
    """Scores and logits are capped; every other layer attends within a window."""
    softcap = fields.number_or_none("attn_logit_softcapping", 50.0)

    def attend(number: int) -> AttentionSpec:
        is_local = fields.layer_type(number, lambda each: each % 2 == 0) == SLIDING
        window = fields.count("sliding_window", 4096) if is_local else None
        return attention(fields, number, scale=_scale(fields), softcap=softcap, window=window)

    return _sandwiched(fields, attend, logits_softcap=fields.number_or_none("final_logit_softcapping", 30.0))


def gemma3(fields: ConfigFields) -> DecoderSpec:
    """Heads are normalised; layers with a window have a rotation of their own, five of six in most models."""
    pattern, local_theta = (
        fields.count("sliding_window_pattern", fields.count("_sliding_window_pattern", 6)),
        fields.positive("rope_local_base_freq", _LOCAL_THETA),
    )
    softcap = fields.number_or_none("attn_logit_softcapping", None)

    def attend(number: int) -> AttentionSpec:
        layer_type = fields.layer_type(number, lambda each: bool((each + 1) % pattern))
        is_local = layer_type == SLIDING
        return attention(
            fields,
            number,
            rope=fields.rope_of_type(layer_type or FULL, local_theta=local_theta, theta=1e6),
            scale=_scale(fields),
            softcap=softcap,
            window=fields.count("sliding_window", 4096) if is_local else None,
            **head_norms(fields, number, offset=1.0),
        )

    return _sandwiched(fields, attend, logits_softcap=fields.number_or_none("final_logit_softcapping", None))


def _scale(fields: ConfigFields) -> float:
    return float(fields.positive("query_pre_attn_scalar", 256) ** -0.5)


def _mlp(fields: ConfigFields, number: int) -> GatedMLPSpec:
    for field in ("hidden_act", "hidden_activation"):
        fields.must_be(field, "activation function", *_GELU)
    return gated_mlp(fields, number, activation="gelu_tanh")


def _sandwiched(
    fields: ConfigFields, attend: Callable[[int], AttentionSpec], *, logits_softcap: float | None
) -> DecoderSpec:
    names = (
        *("input_layernorm", "post_attention_layernorm"),
        *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    )

    def layer(number: int) -> tuple[SublayerSpec, ...]:
        return sandwich(fields, number, attend(number), _mlp(fields, number), names, offset=1.0)

    return _decoder(fields, layer, logits_softcap)


def _decoder(
    fields: ConfigFields, layer: Callable[[int], tuple[SublayerSpec, ...]], logits_softcap: float | None = None
) -> DecoderSpec:
    return decoder(
        fields,
        layer,
        ties_by_default=True,
        norm=norm(fields, "model.norm", offset=1.0),
        embedding_scale=fields.count("hidden_size") ** 0.5,
        logits_softcap=logits_softcap,
    )
