"""The products of a model with its weights, as one rank computes them."""

from collections.abc import Iterator
from dataclasses import replace

from worker_svc.core.config import ModelConfig
from worker_svc.core.kernels.linear.product import Product
from worker_svc.core.layers.delta_rule import delta_rule_heads
from worker_svc.core.layers.embedding import padded_rows
from worker_svc.core.layers.mlp import gated_columns
from worker_svc.core.layers.placement import Placement
from worker_svc.core.models.spec import AnyAttentionSpec, AttentionSpec, DeltaRuleSpec


def model_products(config: ModelConfig, placement: Placement) -> tuple[Product, ...]:
    """Those of layers and of the head, each once, in all kinds that they may be computed as; plain ones first, which
    stand in others.
    """
    layers = _layer_products(config, placement)
    rows = padded_rows(config.decoder.vocab_size, placement.group.world_size)
    head = Product("plain", rows, config.decoder.hidden_size, _name(placement))
    alone = [head, *(each for each in layers if each.kind == "plain")]
    gated = [each for each in layers if each.kind == "gated"]
    plain = [*alone, *(replace(each, kind="plain") for each in gated)]
    normed = [replace(each, kind="normed") for each in alone]
    return tuple(dict.fromkeys((*plain, *normed, *(each for each in layers if each.kind != "plain"))))


def _layer_products(config: ModelConfig, placement: Placement) -> tuple[Product, ...]:
    """Of each layer: queries, keys and values; what attention, the delta rule and dense feed-forward blocks add; gates
    and ups. Experts have kernels of their own, of which tables say nothing.
    """
    attention, hidden = config.attention, config.decoder.hidden_size
    heads, kv_heads = (
        part.stop - part.start
        for part in (
            placement.part(attention.num_heads, "num_attention_heads"),
            placement.kv_heads(attention.num_kv_heads),
        )
    )
    dtype = _name(placement)
    columns = [gated_columns(placement, each) for each in config.decoder.mlps]
    sizes = dict.fromkeys(each.stop - each.start for each in columns)
    return (
        *_attention_products(attention, heads, kv_heads, hidden, dtype),
        *_delta_products(config.decoder.delta_rules, placement, hidden),
        *(Product("added", hidden, size, dtype) for size in sizes),
        *(Product("gated", 2 * size, hidden, dtype) for size in sizes),
    )


def _delta_products(specs: tuple[DeltaRuleSpec, ...], placement: Placement, hidden: int) -> Iterator[Product]:
    """Layers are alike."""
    for spec in specs[:1]:
        keys, values = (part.stop - part.start for part in delta_rule_heads(placement, spec))
        num_values = values * spec.value_dim
        outputs = 2 * keys * spec.key_dim + 2 * num_values + 2 * values
        yield Product("plain", outputs, hidden, _name(placement))
        yield Product("added", hidden, num_values, _name(placement))


def _attention_products(
    attention: AnyAttentionSpec, heads: int, kv_heads: int, hidden: int, dtype: str
) -> Iterator[Product]:
    if isinstance(attention, AttentionSpec):
        attended = heads * attention.head_dim
        num_gated = attended if attention.gate is not None else 0
        yield Product("plain", attended + 2 * kv_heads * attention.head_dim + num_gated, hidden, dtype)
        yield Product("added", hidden, attended, dtype)
        return
    queries = heads * attention.query_dims
    yield Product("plain", (attention.query_rank or queries) + attention.head_dim, hidden, dtype)
    if attention.query_rank:
        yield Product("plain", queries, attention.query_rank, dtype)
    yield Product("added", hidden, heads * attention.value_dims, dtype)


def _name(placement: Placement) -> str:
    return str(placement.dtype).removeprefix("torch.")
