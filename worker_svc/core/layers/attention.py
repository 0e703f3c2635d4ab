"""Grouped-query attention (Ainslie et al., 2023) with rotary position embedding."""

import torch
from torch import Tensor

from worker_svc.core.attention.interface import StepAttention
from worker_svc.core.layers.fusion import Normed, Product, attend
from worker_svc.core.layers.linear import Linear, Projection
from worker_svc.core.layers.norm import RMSNorm
from worker_svc.core.layers.placement import Placement
from worker_svc.core.layers.rotary import RotaryEmbedding, order_of_dims
from worker_svc.core.models.spec import AttentionSpec, NormSpec


class Attention:
    """o(attention(q, k, v)), or o(attention(q, k, v) * sigmoid(gate)); q, k, v and gate are one product, of this rank's
    heads.
    """

    def __init__(
        self, placement: Placement, spec: AttentionSpec, hidden_size: int, layer: int, rotary: RotaryEmbedding
    ) -> None:
        heads = placement.part(spec.num_heads, "num_attention_heads")
        kv_heads = placement.kv_heads(spec.num_kv_heads)
        dim = spec.head_dim
        num_queries, num_keys = spec.num_heads * dim, spec.num_kv_heads * dim
        queries = slice(heads.start * dim, heads.stop * dim)
        keys = slice(kv_heads.start * dim, kv_heads.stop * dim)

        def make_norm(norm: NormSpec | None, size: int, part: slice) -> RMSNorm | None:
            if norm is None:
                return None
            if spec.norms_all_heads:
                return RMSNorm(placement, norm, size, part=part)
            return RMSNorm(placement, norm, dim, is_of_head=True)

        self._layer = layer
        self._rotary = rotary
        self._head_order = order_of_dims(spec.rope, dim)
        self._heads = len(range(num_queries)[queries]) // dim, len(range(num_keys)[keys]) // dim
        projections = [
            Projection(spec.query, num_queries, queries),
            Projection(spec.key, num_keys, keys),
            Projection(spec.value, num_keys, keys),
        ]
        if spec.gate is not None:
            projections.append(Projection(spec.gate, num_queries, queries))
        self.input = Linear(placement, projections, hidden_size, has_bias=spec.has_bias)
        self._query_norm = make_norm(spec.query_norm, num_queries, queries)
        self._key_norm = make_norm(spec.key_norm, num_keys, keys)
        self._sinks: Tensor | None = None
        if spec.sinks is not None:
            self._sinks = placement.empty(heads.stop - heads.start)
            placement.want(spec.sinks, self._sinks, (spec.num_heads,), heads)
        output = Projection(spec.output, hidden_size, slice(0, hidden_size))
        self.output = Linear(placement, [output], num_queries, queries, has_bias=spec.has_output_bias)

    def prepare(self) -> None:
        """Bring the weights into the form in which they are multiplied, once, when they are there."""
        self.input.prepare()
        heads, kv_heads = self._heads
        queries = keys = of_head = None
        if self._head_order is not None:
            of_head = torch.tensor(self._head_order, device=self._rotary.table.device)
            queries, keys = _of_heads(of_head, heads), _of_heads(of_head, kv_heads)
            sizes = self.input.sizes
            values = torch.arange(sum(sizes[:2]), sum(sizes), device=of_head.device)
            self.input.reorder_outputs(torch.cat((queries, sizes[0] + keys, values)))
        for norm, order in ((self._query_norm, queries), (self._key_norm, keys)):
            if norm is not None:
                norm.prepare(of_head if norm.is_of_head else order)

    def scale_outputs(self, factor: float) -> None:
        """Multiply what comes out by `factor`, once, when the weights are there."""
        self.output.scale_outputs(factor)

    def __call__(self, x: Tensor | Normed, attention: StepAttention, rows: Tensor | None = None) -> Product:
        """x [tokens, hidden_size] -> like x, or of `rows` i64[n] alone; keys and values are all written."""
        q, k, v, *gates = self.input(x)
        if self._query_norm is not None and self._key_norm is not None:
            q, k = self._query_norm(q), self._key_norm(k)
        q, k = self._rotary(q, k)
        gate = gates[0] if gates else None
        attended = attend(attention, self._layer, q, k, v, sinks=self._sinks, gate=gate)
        return self.output(attended if rows is None else attended[rows])


def _of_heads(order: Tensor, count: int) -> Tensor:
    """The order of one head's dimensions, of several one after the other: i64[count * head_dim]."""
    return (torch.arange(count, device=order.device).unsqueeze(1) * len(order) + order).flatten()
