"""Latent attention over a paged cache: of sequences that advance by one token, and of chunks of prompts."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from worker_svc.core.kernels.attention.decode import DecodeRows
from worker_svc.core.kernels.attention.latent_tiles import LEAST_DIMS, add_parts, attend_latents, write_latents
from worker_svc.core.kernels.attention.prefill import QUERY_TILE, PrefillTiles
from worker_svc.core.kernels.attention.tuning import LatentCut, LatentTile, find_latent_cut, find_latent_tile
from worker_svc.core.kernels.launch import has_dependent_launch, multiprocessors, options, shared_memory

_LOG2E = 1.4426950408889634
_PARTS_AT_ONCE = 4  # parts of one head that are added up at a time


@dataclass(frozen=True, slots=True)
class LatentDims:
    """Of the one head that is in the cache."""

    rank: int  # of the latent
    rotated: int

    @property
    def head_dim(self) -> int:
        """All of them."""
        return self.rank + self.rotated

    @property
    def tile_dims(self) -> int:
        """With what pads their tiles."""
        halves = (1 << (dims // 2 - 1).bit_length() for dims in (self.rank, self.rotated))
        return 2 * sum(max(LEAST_DIMS, each) for each in halves)


class LatentKernels:
    """Latent attention of `num_heads` query heads, for up to `max_sequences` that advance by one token; on one stream.

    Heads are [tokens, (num_heads + 1) * head_dim], the last of which is the new key; the cache [num_blocks, block_size,
    1, head_dim] with any strides but the last; block tables i32[slots, blocks]; out [tokens, num_heads * head_dim], of
    which rotated dimensions are not written.
    """

    def __init__(
        self, max_sequences: int, num_heads: int, dims: LatentDims, rotary: Tensor, scale: float, item_bytes: int = 2
    ) -> None:
        """rotary: f32[positions, head_dim], cosines and sines; scale: of scores; item_bytes: of a number."""
        device = rotary.device
        self._num_heads, self._dims, self._rotary = num_heads, dims, rotary
        self._scale = scale * _LOG2E  # softmax is to the base of 2
        self._dependent = has_dependent_launch(device)
        self._multiprocessors = multiprocessors(device, 0)
        self._row_bytes, self._shared_bytes = dims.tile_dims * item_bytes, shared_memory(device)
        splits = {count: self._find_cut(count).splits for count in range(1, max_sequences + 1)}
        most = max((count * each for count, each in splits.items() if each > 1), default=0)
        self._partial = torch.empty(most * num_heads * dims.rank, device=device)
        self._weight = torch.empty(most * num_heads, device=device)

    def _find_cut(self, sequences: int) -> LatentCut:
        tile = self._find_tile(self._num_heads)
        return find_latent_cut(sequences, self._num_heads, tile, len(self._rotary), self._multiprocessors)

    def _find_tile(self, rows: int) -> LatentTile:
        return find_latent_tile(rows, self._dims.rank, self._row_bytes, self._shared_bytes)

    def write_decodes(self, heads: Tensor, rows: DecodeRows, block_tables: Tensor, cached: Tensor) -> None:
        """Rotate the keys of `rows` and write them into the cache, each as the last of its context."""
        self._write(heads, len(rows), (rows.rows, rows.slots, rows.contexts, rows.slots), block_tables, cached)

    def write_tokens(self, heads: Tensor, positions: Tensor, slot_mapping: Tensor, cached: Tensor) -> None:
        """As `write_decodes`, of all rows: positions and slot_mapping (block * block_size + offset) are i64[tokens]."""
        self._write(heads, len(heads), (positions, positions, positions, slot_mapping), None, cached)

    def _write(
        self, heads: Tensor, count: int, columns: Sequence[Tensor], block_tables: Tensor | None, cached: Tensor
    ) -> None:
        dims = self._dims
        write_latents[(count,)](
            heads,
            self._rotary,
            *columns,
            block_tables if block_tables is not None else columns[0],
            cached,
            block_tables.stride(0) if block_tables is not None else 0,
            cached.stride(0),
            cached.stride(1),
            H=self._num_heads,
            RANK=dims.rank,
            ROTATED=dims.rotated,
            BLOCK_SIZE=cached.shape[1],
            DECODE=block_tables is not None,
            DEPENDENT=self._dependent,
            **options(warps=1, dependent=self._dependent),
        )

    def decode(self, heads: Tensor, rows: DecodeRows, block_tables: Tensor, cached: Tensor, out: Tensor) -> None:
        """The attention of `rows`, whose keys are in the cache, into their rows of `out`: split over contexts (Dao et
        al., Flash-Decoding, 2023).
        """
        dims, cut = self._dims, self._find_cut(rows.kernels_for)
        columns = rows.rows, rows.contexts, rows.contexts, rows.slots
        self._attend(heads, columns, block_tables, cached, out, 1, cut, is_decode=True)
        if cut.splits == 1:
            return
        add_parts[(self._num_heads, len(rows))](
            self._partial,
            self._weight,
            out,
            rows.rows,
            rows.contexts,
            cut.splits,
            H=self._num_heads,
            RANK=dims.rank,
            ROTATED=dims.rotated,
            BLOCK_T=cut.tile.tokens,
            SPLIT_T=cut.split_tokens,
            PARTS=_PARTS_AT_ONCE,
            DEPENDENT=self._dependent,
            **options(warps=4, dependent=self._dependent),
        )

    def prefill(self, heads: Tensor, tiles: PrefillTiles, block_tables: Tensor, cached: Tensor, out: Tensor) -> None:
        """The causal attention of the tiles' rows, whose keys are in the cache, into their rows of `out`."""
        columns = tiles.rows, tiles.positions, tiles.lengths, tiles.slots
        cut = LatentCut(1, 1, self._find_tile(QUERY_TILE * self._num_heads))
        self._attend(heads, columns, block_tables, cached, out, QUERY_TILE, cut, is_decode=False)

    def _attend(
        self,
        heads: Tensor,
        columns: Sequence[Tensor],
        block_tables: Tensor,
        cached: Tensor,
        out: Tensor,
        most_tokens: int,
        cut: LatentCut,
        *,
        is_decode: bool,
    ) -> None:
        """`columns`: as the kernel has them of its tiles, of at most so many tokens."""
        dims, tile = self._dims, cut.tile
        programs = triton.cdiv(most_tokens * self._num_heads, tile.rows), cut.splits, len(columns[0])
        attend_latents[programs](
            heads,
            cached,
            self._rotary,
            out,
            self._partial,
            self._weight,
            *columns,
            block_tables,
            self._scale,
            block_tables.stride(0),
            cached.stride(0),
            cached.stride(1),
            H=self._num_heads,
            RANK=dims.rank,
            ROTATED=dims.rotated,
            BLOCK_SIZE=cached.shape[1],
            BLOCK_M=tile.rows,
            BLOCK_T=tile.tokens,
            STAGES=tile.stages,
            SPLIT_T=cut.split_tokens,
            DECODE=is_decode,
            SPLIT=cut.splits > 1,
            DEPENDENT=self._dependent,
            **options(warps=tile.warps, dependent=self._dependent),
        )
