"""The paged KV cache of one rank."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class KVCacheShape:
    """The shape of one token's KV on one rank."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    shares_values: bool = False  # values are read out of the keys: nothing else is kept

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, keys and values."""
        of_keys = self.num_layers * self.block_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize
        return of_keys if self.shares_values else 2 * of_keys


class KVCache:
    """Keys and values, each [num_layers, num_blocks, block_size, num_kv_heads, head_dim]; one tensor where they are
    shared.
    """

    def __init__(self, shape: KVCacheShape, num_blocks: int, device: torch.device) -> None:
        size = (shape.num_layers, num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
        self.shape = shape
        self.keys = torch.zeros(size, dtype=shape.dtype, device=device)
        self.values = self.keys if shape.shares_values else torch.zeros(size, dtype=shape.dtype, device=device)

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, each [num_blocks, block_size, num_kv_heads, head_dim], views."""
        return self.keys[layer], self.values[layer]

    def copy_blocks(self, sources: Tensor, targets: Tensor) -> None:
        """Copy whole blocks in all layers; all sources are read before a target is written."""
        self.keys.index_copy_(1, targets, self.keys.index_select(1, sources))
        if not self.shape.shares_values:
            self.values.index_copy_(1, targets, self.values.index_select(1, sources))
