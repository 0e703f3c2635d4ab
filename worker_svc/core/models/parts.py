"""The parts of most families, in the words of a checkpoint of transformers."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from worker_svc.core.models.config_fields import ConfigFields
from worker_svc.core.models.spec import (
    AttentionSpec,
    DecoderSpec,
    GatedMLPSpec,
    NormSpec,
    StoredRows,
    SublayerSpec,
)


def norm(fields: ConfigFields, name: str) -> NormSpec:
    """With the epsilon of all norms."""
    return NormSpec(name, fields.positive("rms_norm_eps", 1e-6))


def attention(fields: ConfigFields, layer: int, **changes: Any) -> AttentionSpec:
    """Of a layer, as Llama's but for `changes`."""
    name = f"model.layers.{layer}.self_attn"
    num_heads = fields.count("num_attention_heads")
    num_kv_heads = fields.count("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fields.wrong("num_key_value_heads", f"does not divide num_attention_heads ({num_heads})")
    head_dim = fields.count("head_dim", fields.count("hidden_size") // num_heads)
    if head_dim % 2:
        raise fields.wrong("head_dim", "is odd, rotary embedding needs pairs")
    query, key, value, output = (StoredRows(f"{name}.{each}_proj") for each in "qkvo")
    plain = AttentionSpec(num_heads, num_kv_heads, head_dim, query, key, value, output, fields.rope())
    return replace(plain, **changes)


def head_norms(fields: ConfigFields, layer: int) -> dict[str, NormSpec]:
    """Changes of an attention whose queries and keys are normalised before they are rotated."""
    name = f"model.layers.{layer}.self_attn"
    return {"query_norm": norm(fields, f"{name}.q_norm"), "key_norm": norm(fields, f"{name}.k_norm")}


def gated_mlp(fields: ConfigFields, layer: int, **changes: Any) -> GatedMLPSpec:
    """Of a layer, as Llama's but for `changes`."""
    fields.must_be("hidden_act", "silu", "activation function")
    gate, up, down = (StoredRows(f"model.layers.{layer}.mlp.{each}_proj") for each in ("gate", "up", "down"))
    return replace(GatedMLPSpec(fields.count("intermediate_size"), gate, up, down), **changes)


def pre_norm(
    fields: ConfigFields, layer: int, attend: AttentionSpec, mlp: GatedMLPSpec, *, scale: float = 1.0
) -> tuple[SublayerSpec, ...]:
    """A layer whose two blocks read normalised hidden states."""
    name = f"model.layers.{layer}"
    return (
        SublayerSpec(attend, norm(fields, f"{name}.input_layernorm"), scale=scale),
        SublayerSpec(mlp, norm(fields, f"{name}.post_attention_layernorm"), scale=scale),
    )


def decoder(fields: ConfigFields, make_layer: Callable[[int], tuple[SublayerSpec, ...]], **changes: Any) -> DecoderSpec:
    """The whole model, as Llama's but for `changes`."""
    layers = tuple(make_layer(layer) for layer in range(fields.count("num_hidden_layers")))
    plain = DecoderSpec(
        fields.count("vocab_size"),
        fields.count("hidden_size"),
        layers,
        norm(fields, "model.norm"),
        is_tied=fields.flag("tie_word_embeddings"),
    )
    return replace(plain, **changes)
