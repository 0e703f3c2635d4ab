"""Own kernels for half precision on CUDA: sequences that advance by one token go through the decode kernel, which takes
the norms, the rotation and the cache's write along; longer chunks through the prefill kernel.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from worker_svc.core.attention.interface import HeadNorms
from worker_svc.core.batch import Batch
from worker_svc.core.kernels.decode_attention import DecodeAttention, DecodeRows
from worker_svc.core.kernels.prefill_attention import QUERY_TILE, PrefillTiles, prefill_attention
from worker_svc.core.kernels.rope import rope_write
from worker_svc.core.kv_cache import KVCache
from worker_svc.core.layers.rotary import RotaryEmbedding
from worker_svc.core.slots import I64
from worker_svc.core.transfer import upload


class TritonAttention:
    """Backend over one KV cache, for `num_heads` query heads and at most `max_num_seqs` sequences a step."""

    def __init__(self, cache: KVCache, num_heads: int, rotary: RotaryEmbedding, max_num_seqs: int) -> None:
        shape = cache.shape
        self.cache = cache
        self.rotary = rotary.table
        self.num_heads = num_heads
        self.decode = DecodeAttention(max_num_seqs, num_heads, shape.num_kv_heads, shape.head_dim, rotary.table)

    def prepare(
        self, batch: Batch, positions: Tensor, slot_mapping: Tensor, block_tables: Tensor
    ) -> "TritonStepAttention":
        """See `AttentionBackend.prepare`."""
        is_decode = batch.query_lens == 1
        prefill_rows = np.flatnonzero(np.repeat(~is_decode, batch.query_lens))
        columns = upload(
            positions.device,
            batch.query_starts[:-1][is_decode],
            batch.slots[is_decode],
            batch.context_lens[is_decode],
            *_tiles(batch, np.flatnonzero(~is_decode)),
            prefill_rows,
        )
        prefill = None
        if len(prefill_rows):
            prefill = _Prefill(PrefillTiles(*columns[3:7]), columns[7], positions, slot_mapping)
        return TritonStepAttention(self, block_tables, DecodeRows(*columns[:3]), prefill)

    def prepare_decode(self, rows: DecodeRows, block_tables: Tensor) -> "TritonStepAttention":
        """The attention of a step in which all sequences advance by one token; launches nothing."""
        return TritonStepAttention(self, block_tables, rows, prefill=None)


@dataclass(frozen=True, slots=True)
class _Prefill:
    """The tokens of a step that come in chunks."""

    tiles: PrefillTiles
    rows: Tensor  # i64[n]: theirs in the flat columns
    positions: Tensor  # i64[tokens], as the next
    slot_mapping: Tensor


def _tiles(batch: Batch, sequences: I64) -> tuple[I64, I64, I64, I64]:
    """First rows, positions, lengths and slots of `PrefillTiles`, those with the longest context first."""
    query_lens = batch.query_lens[sequences]
    counts = -(-query_lens // QUERY_TILE)
    owners = np.repeat(np.arange(len(sequences)), counts)
    offsets = (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)) * QUERY_TILE
    positions = (batch.context_lens[sequences] - query_lens)[owners] + offsets
    order = np.argsort(-positions, kind="stable")
    owners, offsets = owners[order], offsets[order]
    return (
        batch.query_starts[sequences][owners] + offsets,
        positions[order],
        np.minimum(query_lens[owners] - offsets, QUERY_TILE),
        batch.slots[sequences][owners],
    )


class TritonStepAttention:
    """See `StepAttention`."""

    def __init__(
        self, backend: TritonAttention, block_tables: Tensor, decode_rows: DecodeRows, prefill: _Prefill | None
    ) -> None:
        self._backend = backend
        self._block_tables = block_tables
        self._decode_rows = decode_rows
        self._prefill = prefill

    def attend(self, layer: int, qkv: Tensor, head_norms: HeadNorms | None) -> Tensor:
        """See `StepAttention.attend`."""
        backend, tables = self._backend, self._block_tables
        keys, values = backend.cache.layer(layer)
        norms, eps = None, 0.0
        if head_norms is not None:
            norms, eps = (head_norms.query.weight, head_norms.key.weight), head_norms.query.eps
        out = torch.empty(len(qkv), backend.num_heads * keys.shape[-1], dtype=qkv.dtype, device=qkv.device)
        if (prefill := self._prefill) is not None:
            rope_write(
                qkv, norms, eps, backend.rotary, prefill.rows, prefill.positions, prefill.slot_mapping, keys, values
            )
            prefill_attention(qkv, prefill.tiles, tables, keys, values, out)
        if len(self._decode_rows):
            backend.decode.attend(qkv, norms, eps, self._decode_rows, tables, keys, values, out)
        return out
