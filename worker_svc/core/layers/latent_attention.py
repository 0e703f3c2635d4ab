"""Multi-head latent attention (DeepSeek-V2, 2024), absorbed: queries are brought to the latent, which is both key and
value of all heads, and what they attend to is brought from it to values.
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
        self._spec = spec
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
        self._norm = RMSNorm(placement, spec.down_norm, spec.rank)
        self._up = self._make_up(placement, heads)
        output = Projection(spec.output, hidden_size, slice(0, hidden_size))
        self.output = Linear(placement, [output], num_values, values, has_bias=spec.has_output_bias)

    def _make_up(self, placement: Placement, heads: slice) -> Tensor:
        """Room for keys and values out of the latent, [heads, plain_dims + value_dims, rank]; no product has them as
        they are stored, so they are floats.
        """
        spec = self._spec
        size = spec.plain_dims + spec.value_dims
        weight = placement.empty(self._num_heads * size, spec.rank)
        rows = slice(heads.start * size, heads.stop * size)
        part = StoredPart(spec.up.name, (spec.num_heads * size, spec.rank), rows, slice(0, spec.rank))
        placement.want_weight(part, weight)
        return weight.view(self._num_heads, size, spec.rank)

    def prepare(self) -> None:
        """Bring the weights into the form in which they are multiplied, once, when they are there."""
        self._norm.prepare()
        if self._query_norm is not None:
            self._query_norm.prepare()

    def scale_outputs(self, factor: float) -> None:
        """Multiply what comes out by `factor`, once, when the weights are there."""
        self.output.scale_outputs(factor)

    def __call__(self, x: Tensor | Normed, attention: StepAttention, rows: Tensor | None = None) -> Product:
        """x [tokens, hidden_size] -> like x, or of `rows` i64[n] alone; latents are all written."""
        spec = self._spec
        first, down = torch.split(self._operations.norm_linear(*operand(x), self.input), self.input.sizes, dim=-1)
        if self._query is not None:
            # Kernels read rows that follow each other.
            first = self._operations.norm_linear(first.contiguous(), self._query_norm, self._query)
        queries = first.reshape(len(first), self._num_heads, spec.query_dims)
        plain, turned = torch.split(queries, [spec.plain_dims, spec.rotated_dims], dim=-1)
        latent, key = torch.split(down, [spec.rank, spec.rotated_dims], dim=-1)
        latent = self._operations.norm(latent, self._norm)
        keys_up, values_up = torch.split(self._up, [spec.plain_dims, spec.value_dims], dim=1)
        heads = first.new_empty(len(first), self._num_heads + 1, 2, spec.head_dim // 2)
        turned_dims, latent_dims = torch.split(heads, [spec.rotated_dims // 2, spec.rank // 2], dim=-1)
        turned_dims[:, :-1].copy_(self._halves(turned))
        turned_dims[:, -1].copy_(self._halves(key))
        latent_dims[:, -1].copy_(latent.view(len(latent), 2, -1))
        for half, weight in zip(latent_dims[:, :-1].unbind(2), keys_up.chunk(2, dim=-1), strict=True):
            torch.bmm(plain.transpose(0, 1), weight, out=half.transpose(0, 1))  # to where it is read: no copy after it
        attended = attention.attend(self._layer, heads.flatten(1), None)
        if rows is not None:
            attended = attended[rows]
        seen = self._latent_of(attended.view(len(attended), self._num_heads, spec.head_dim))
        return self.output(torch.einsum("thr,hvr->thv", seen, values_up).flatten(1))

    def _halves(self, turned: Tensor) -> Tensor:
        """Dimensions that turn against each other, [..., 2, rotated_dims / 2]: the first of both halves of a head. Its
        others are the latent's.
        """
        rope = self._spec.rope
        if rope is not None and rope.is_paired:
            return turned.view(*turned.shape[:-1], -1, 2).transpose(-1, -2)
        return turned.view(*turned.shape[:-1], 2, -1)

    def _latent_of(self, head: Tensor) -> Tensor:
        """The latent of a head [..., head_dim]."""
        half, pairs = self._spec.head_dim // 2, self._spec.rotated_dims // 2
        return torch.cat((head[..., pairs:half], head[..., half + pairs :]), dim=-1)
