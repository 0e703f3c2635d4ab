"""The paged KV cache of one rank."""

from dataclasses import dataclass

import torch
from torch import Tensor

from contract.domain.kv_kinds import SEES_ALL, Reach
from worker_svc.core.kv_layout import KVLayout, plan_layout
from worker_svc.core.kv_scales import KEPT_DTYPE, KVScales


@dataclass(frozen=True, slots=True)
class KVCacheShape:
    """The shape of one token's KV on one rank."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int  # of the kind of layers whose blocks hold the fewest tokens
    dtype: torch.dtype  # in which keys and values are computed
    shares_values: bool = False  # values are read out of the keys: nothing else is kept
    scales: KVScales | None = None  # of what is kept as 8-bit floats; None: it is kept as it is computed
    reaches: tuple[Reach, ...] = ()  # by layer, the tokens that one sees; empty: all see all

    @property
    def kept_dtype(self) -> torch.dtype:
        """Of what is in the cache."""
        return self.dtype if self.scales is None else KEPT_DTYPE

    @property
    def layout(self) -> KVLayout:
        """The places of all layers."""
        return plan_layout(self.reaches or (SEES_ALL,) * self.num_layers, self.block_size)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, keys and values."""
        num_tokens = self.layout.num_rows * self.layout.num_pages * self.block_size
        of_keys = num_tokens * self.num_kv_heads * self.head_dim * self.kept_dtype.itemsize
        return of_keys if self.shares_values else 2 * of_keys

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers, as long as all of them keep it."""
        return sum(self.block_bytes // kind.block_size for kind in self.layout.kinds)


class KVCache:
    """Keys and values, each [num_rows, num_blocks * num_pages, block_size, num_kv_heads, head_dim] as `KVLayout` says;
    one tensor where they are shared.
    """

    def __init__(self, shape: KVCacheShape, num_blocks: int, device: torch.device) -> None:
        layout = shape.layout
        self._num_pages = layout.num_pages
        size = (
            layout.num_rows,
            num_blocks * self._num_pages,
            shape.block_size,
            shape.num_kv_heads,
            shape.head_dim,
        )
        self.shape = shape
        self.kinds = [place.kind for place in layout.layers]  # by layer
        self.keys = torch.zeros(size, dtype=shape.kept_dtype, device=device)
        self.values = self.keys if shape.shares_values else torch.zeros_like(self.keys)
        self._layers = [(self.keys[at.row, at.page :], self.values[at.row, at.page :]) for at in layout.layers]

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, each [pages, block_size, num_kv_heads, head_dim], views: the pages of block i are
        those from i * num_pages on."""
        return self._layers[layer]

    def scales(self, layer: int) -> tuple[float, float]:
        """Those of a layer's keys and values: kept numbers times these are what was computed."""
        return (1.0, 1.0) if self.shape.scales is None else self.shape.scales.of_layer(layer)

    def copy_blocks(self, sources: Tensor, targets: Tensor) -> None:
        """Copy whole blocks in all layers; all sources are read before a target is written."""
        for cached in (self.keys,) if self.shape.shares_values else (self.keys, self.values):
            moved = movable(cached)
            blocks = moved.view(len(moved), -1, self._num_pages, *moved.shape[2:])
            blocks.index_copy_(1, targets, blocks.index_select(1, sources))


def movable(cached: Tensor) -> Tensor:
    """The same memory in a dtype that torch moves by index: it does not move 8-bit floats."""
    return cached.view(torch.uint8) if cached.dtype == KEPT_DTYPE else cached
