"""The reference: plain torch, runs on any device, softmax in fp32 or better. Sequences are read through the block
table; those that advance by one token go together, padded to the longest of their group.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from worker_svc.core.batch import Batch
from worker_svc.core.kv_cache import KVCache
from worker_svc.core.slots import I64
from worker_svc.core.transfer import upload

_GROUP_TOKENS = 1 << 17  # context tokens, padding included, that one group of decodes may gather at once


@dataclass(frozen=True, slots=True)
class _Group:
    """Sequences of equal query length that attend in one call."""

    num_seqs: int
    query_len: int
    tokens: Tensor  # i64[num_seqs * query_len]: their rows in the flat columns
    cells: Tensor  # i64[num_seqs * context]: where their KV stands, padded with any cell
    mask: Tensor  # bool[num_seqs, 1, query_len, context]: which of it each query sees


class TorchAttention:
    """Backend over one KV cache."""

    def __init__(self, cache: KVCache, num_heads: int) -> None:
        self._cache = cache
        self._num_heads = num_heads

    def prepare(self, batch: Batch, slot_mapping: Tensor, block_tables: Tensor) -> "TorchStepAttention":
        """See `AttentionBackend.prepare`."""
        groups = [self._group(batch, rows, block_tables) for rows in _group_rows(batch)]
        return TorchStepAttention(self._cache, self._num_heads, slot_mapping, groups)

    def _group(self, batch: Batch, rows: I64, block_tables: Tensor) -> _Group:
        device = block_tables.device
        block_size = self._cache.shape.block_size
        query_len = int(batch.query_lens[rows[0]])
        context = int(batch.context_lens[rows].max())
        tokens = (batch.query_starts[rows][:, None] + np.arange(query_len)).ravel()
        slots, first, tokens_on_device = upload(device, batch.slots[rows], batch.context_lens[rows] - query_len, tokens)
        blocks = block_tables[slots, : -(-context // block_size)]
        offsets = torch.arange(block_size, device=device)
        cells = (blocks.unsqueeze(-1) * block_size + offsets).flatten(1)[:, :context]
        seen = first.unsqueeze(1) + torch.arange(query_len, device=device)
        mask = torch.arange(context, device=device) <= seen.unsqueeze(-1)
        return _Group(len(rows), query_len, tokens_on_device, cells.flatten(), mask.unsqueeze(1))


def _group_rows(batch: Batch) -> list[I64]:
    """Decodes by similar context length, within a bound on what they gather; every prefill alone."""
    decodes = np.flatnonzero(batch.query_lens == 1)
    decodes = decodes[np.argsort(batch.context_lens[decodes], kind="stable")]
    groups: list[I64] = list(np.flatnonzero(batch.query_lens > 1)[:, None])
    start = 0
    while start < len(decodes):
        # Sorted, so the last of a group is its longest: the group may grow while length * size stays in bounds.
        padded = batch.context_lens[decodes[start:]] * np.arange(1, len(decodes) - start + 1)
        size = max(1, int(np.searchsorted(padded, _GROUP_TOKENS, side="right")))
        groups.append(decodes[start : start + size])
        start += size
    return groups


class TorchStepAttention:
    """See `StepAttention`."""

    def __init__(self, cache: KVCache, num_heads: int, slot_mapping: Tensor, groups: list[_Group]) -> None:
        self._cache = cache
        self._slot_mapping = slot_mapping
        self._groups = groups
        self._num_kv_heads = cache.shape.num_kv_heads
        self._queries_per_head = num_heads // cache.shape.num_kv_heads

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `StepAttention.attend`."""
        keys, values = self._cache.layer(layer)
        keys.index_copy_(0, self._slot_mapping, key)
        values.index_copy_(0, self._slot_mapping, value)
        out = torch.empty_like(query)
        for group in self._groups:
            out.index_copy_(0, group.tokens, self._attend_group(group, query, keys, values))
        return out

    def _attend_group(self, group: _Group, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        head_dim = query.shape[-1]
        seqs, query_len, per_head = group.num_seqs, group.query_len, self._queries_per_head
        # The query heads that share a key-value head stand as further queries of it: keys need no repeat.
        folded = (
            query.index_select(0, group.tokens)
            .view(seqs, query_len, self._num_kv_heads, per_head, head_dim)
            .permute(0, 2, 3, 1, 4)
            .reshape(seqs, self._num_kv_heads, per_head * query_len, head_dim)
        )
        gathered_keys = keys.index_select(0, group.cells).view(seqs, -1, self._num_kv_heads, head_dim).transpose(1, 2)
        gathered_values = (
            values.index_select(0, group.cells).view(seqs, -1, self._num_kv_heads, head_dim).transpose(1, 2)
        )
        mask = group.mask.repeat(1, 1, per_head, 1)
        attended = F.scaled_dot_product_attention(folded, gathered_keys, gathered_values, attn_mask=mask)
        return (
            attended.reshape(seqs, self._num_kv_heads, per_head, query_len, head_dim)
            .permute(0, 3, 1, 2, 4)
            .reshape(seqs * query_len, -1, head_dim)
        )
