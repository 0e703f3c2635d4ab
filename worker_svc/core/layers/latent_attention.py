"""Multi-head latent attention (DeepSeek-V2, 2024): keys and values of all heads are made of one vector of each token,
which alone is kept. Who attends chooses whether they are made, or queries are brought to it instead.
"""

import torch
from torch import Tensor

from worker_svc.core.attention.interface import StepAttention
from worker_svc.core.layers.fusion import Normed, Product, operand
from worker_svc.core.layers.linear import Linear, Projection
from worker_svc.core.layers.norm import RMSNorm
from worker_svc.core.layers.placement import Placement, StoredPart
from worker_svc.core.models.spec import LatentAttentionSpec


class LatentAttention:
    """o(values(attention(q, c))), of this rank's heads; the latents c are whole on every rank."""

    def __init__(self, placement: Placement, spec: LatentAttentionSpec, hidden_size: int, layer: int) -> None:
        heads = placement.part(spec.num_heads, "num_attention_heads")
        self.spec = spec
        self._layer = layer
        self._num_heads = heads.stop - heads.start
        self._operations = placement.operations
        num_queries, num_values = spec.num_heads * spec.query_dims, spec.num_heads * spec.value_dims
        queries = slice(heads.start * spec.query_dims, heads.stop * spec.query_dims)
        values = slice(heads.start * spec.value_dims, heads.stop * spec.value_dims)
        query = Projection(spec.query, num_queries, queries)
        first = query
        self._query: Linear | None = None
        self._query_norm: RMSNorm | None = None
        if spec.query_down is not None:
            first = Projection(spec.query_down, spec.query_rank, slice(0, spec.query_rank))
            self._query = Linear(placement, [query], spec.query_rank)
            if spec.query_norm is not None:
                self._query_norm = RMSNorm(placement, spec.query_norm, spec.query_rank)
        down = Projection(spec.down, spec.head_dim, slice(0, spec.head_dim))
        self.input = Linear(placement, [first, down], hidden_size, has_bias=spec.has_bias)
        self.norm = RMSNorm(placement, spec.down_norm, spec.rank)
        self.up = self._make_up(placement, heads)
        output = Projection(spec.output, hidden_size, slice(0, hidden_size))
        self.output = Linear(placement, [output], num_values, values, has_bias=spec.has_output_bias)

    def _make_up(self, placement: Placement, heads: slice) -> Tensor:
        """Room for keys and values out of the latent, [heads, plain_dims + value_dims, rank]; no product has them as
        they are stored, so they are floats.
        """
        spec = self.spec
        size = spec.plain_dims + spec.value_dims
        weight = placement.empty(self._num_heads * size, spec.rank)
        rows = slice(heads.start * size, heads.stop * size)
        part = StoredPart(spec.up.name, (spec.num_heads * size, spec.rank), rows, slice(0, spec.rank))
        placement.want_weight(part, weight)
        return weight.view(self._num_heads, size, spec.rank)

    def prepare(self) -> None:
        """Bring the weights into the form in which they are multiplied, once, when they are there."""
        self.norm.prepare()
        if self._query_norm is not None:
            self._query_norm.prepare()

    def scale_outputs(self, factor: float) -> None:
        """Multiply what comes out by `factor`, once, when the weights are there."""
        self.output.scale_outputs(factor)

    def __call__(self, x: Tensor | Normed, attention: StepAttention, rows: Tensor | None = None) -> Product:
        """x [tokens, hidden_size] -> like x, or of `rows` i64[n] alone; latents are all written."""
        first, down = torch.split(self._operations.norm_linear(*operand(x), self.input), self.input.sizes, dim=-1)
        if self._query is not None:
            # Kernels read rows that follow each other.
            first = self._operations.norm_linear(first.contiguous(), self._query_norm, self._query)
        attended = attention.attend_latents(self._layer, first, down, self)
        return self.output(attended if rows is None else attended[rows])
