"""Command R (Cohere, 2024) and Command R7B, Command A (2025): attention and feed-forward side by side, layer norms."""

from worker_svc.core.models.config_fields import SLIDING, ConfigFields
from worker_svc.core.models.parts import attention, decoder, gated_mlp, norm
from worker_svc.core.models.spec import AttentionSpec, DecoderSpec, NormSpec, SublayerSpec


def cohere(fields: ConfigFields) -> DecoderSpec:
    """All layers alike."""
    rope = fields.rope(theta=500_000.0, is_paired=True)
    return _decoder(fields, [attention(fields, number, rope=rope, **_biases(fields)) for number in _layers(fields)])


def cohere2(fields: ConfigFields) -> DecoderSpec:
    """Layers with a window are rotated, the others, one of four in most models, are not."""
    pattern = fields.count("sliding_window_pattern", 4)
    _check_own_fields(fields, pattern)
    rope, window = fields.rope(is_paired=True), fields.count("sliding_window", 4096)

    def attend(number: int) -> AttentionSpec:
        is_local = fields.layer_type(number, lambda each: bool((each + 1) % pattern)) == SLIDING
        of_type = {"rope": rope, "window": window} if is_local else {"rope": None}
        return attention(fields, number, **of_type, **_biases(fields))

    return _decoder(fields, [attend(number) for number in _layers(fields)])


def _check_own_fields(fields: ConfigFields, pattern: int) -> None:
    """What Cohere's own code read, where transformers has but one way."""
    if fields.get("layer_types") is None:
        fields.must_be("layer_switch", "groups of layers, the last without a window, of", pattern)
    fields.get("layer_switch")
    fields.must_be("order_of_interleaved_layers", "layers in the order", "local_attn_first")
    fields.must_be("position_embedding_type", "positions by", "rope_gptj")
    fields.must_be("rotary_pct", "rotating a part of each head", 1)
    fields.must_be("use_gated_activation", "a feed-forward whose gate is", True)
    fields.must_be("use_parallel_block", "blocks side by side being", True)
    is_tied = fields.flag("tie_word_embeddings", default=True)
    fields.must_be("use_embedding_sharing", "beside tie_word_embeddings another", is_tied)
    fields.get("use_parallel_embedding")  # of ranks


def _layers(fields: ConfigFields) -> range:
    return range(fields.count("num_hidden_layers"))


def _biases(fields: ConfigFields) -> dict[str, bool]:
    has_bias = fields.flag("attention_bias")
    return {"has_bias": has_bias, "has_output_bias": has_bias}


def _decoder(fields: ConfigFields, attentions: list[AttentionSpec]) -> DecoderSpec:
    def centered(name: str) -> NormSpec:
        return norm(fields, name, eps=fields.positive("layer_norm_eps", 1e-5), is_centered=True)

    def layer(number: int) -> tuple[SublayerSpec, ...]:
        before = centered(f"model.layers.{number}.input_layernorm")
        return (SublayerSpec((attentions[number], gated_mlp(fields, number)), before),)

    scale = fields.positive("logit_scale", 0.0625)
    return decoder(fields, layer, ties_by_default=True, norm=centered("model.norm"), logits_scale=scale)
