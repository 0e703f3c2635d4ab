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


def norm(fields: ConfigFields, name: str, **changes: Any) -> NormSpec:
    """With the epsilon of all norms; as Llama's but for `changes`."""
    return replace(NormSpec(name, fields.positive("rms_norm_eps", 1e-6)), **changes)


def attention(fields: ConfigFields, layer: int, **changes: Any) -> AttentionSpec:
    """Of a layer, as Llama's but for `changes`."""
    name = f"model.layers.{layer}.self_attn"
    num_heads = fields.count("num_attention_heads")
    num_kv_heads = fields.count("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fields.wrong("num_key_value_heads", f"does not divide num_attention_heads ({num_heads})")
    head_dim = changes.get("head_dim") or fields.head_dim
    query, key, value, output = (StoredRows(f"{name}.{each}_proj") for each in "qkvo")
    rope = changes["rope"] if "rope" in changes else fields.rope(head_dim=head_dim)
    plain = AttentionSpec(num_heads, num_kv_heads, head_dim, query, key, value, output, rope)
    return replace(plain, **changes)


def head_norms(fields: ConfigFields, layer: int, **changes: Any) -> dict[str, NormSpec]:
    """Changes of an attention whose queries and keys are normalised before they are rotated."""
    name = f"model.layers.{layer}.self_attn"
    return {f"{of}_norm": norm(fields, f"{name}.{of[0]}_norm", **changes) for of in ("query", "key")}


def gated_mlp(fields: ConfigFields, layer: int, **changes: Any) -> GatedMLPSpec:
    """Of a layer, as Llama's but for `changes`."""
    if "activation" not in changes:
        fields.must_be("hidden_act", "activation function", "silu")
    gate, up, down = (StoredRows(f"model.layers.{layer}.mlp.{each}_proj") for each in ("gate", "up", "down"))
    return replace(GatedMLPSpec(fields.count("intermediate_size"), gate, up, down), **changes)


def pre_norm(
    fields: ConfigFields, layer: int, attend: AttentionSpec, mlp: GatedMLPSpec, *, scale: float = 1.0, **of_norms: Any
) -> tuple[SublayerSpec, ...]:
    """A layer whose two blocks read normalised hidden states; norms are as Llama's but for `of_norms`."""
    name = f"model.layers.{layer}"
    return (
        SublayerSpec((attend,), norm(fields, f"{name}.input_layernorm", **of_norms), scale=scale),
        SublayerSpec((mlp,), norm(fields, f"{name}.post_attention_layernorm", **of_norms), scale=scale),
    )


def sandwich(
    fields: ConfigFields, layer: int, attend: AttentionSpec, mlp: GatedMLPSpec, names: tuple[str, ...], **of_norms: Any
) -> tuple[SublayerSpec, ...]:
    """A layer with norms before and after each of its two blocks, whose four names are given in this order."""
    norms = [norm(fields, f"model.layers.{layer}.{name}", **of_norms) for name in names]
    return SublayerSpec((attend,), norms[0], norms[1]), SublayerSpec((mlp,), norms[2], norms[3])


def packed_gate_up(fields: ConfigFields, layer: int) -> dict[str, StoredRows]:
    """Changes of a feed-forward block whose gate and up are one stored tensor."""
    name, size = f"model.layers.{layer}.mlp.gate_up_proj", fields.count("intermediate_size")
    return {"gate": StoredRows(name, 0, 2 * size), "up": StoredRows(name, size, 2 * size)}


def decoder(
    fields: ConfigFields,
    make_layer: Callable[[int], tuple[SublayerSpec, ...]],
    *,
    ties_by_default: bool = False,
    **changes: Any,
) -> DecoderSpec:
    """The whole model, as Llama's but for `changes`; `ties_by_default`: where the configuration says nothing of it."""
    layers = tuple(make_layer(layer) for layer in range(fields.count("num_hidden_layers")))
    plain = DecoderSpec(
        fields.count("vocab_size"),
        fields.count("hidden_size"),
        layers,
        norm(fields, "model.norm"),
        is_tied=fields.flag("tie_word_embeddings", default=ties_by_default),
    )
    return replace(plain, **changes)
