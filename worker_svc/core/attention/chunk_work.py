"""What the host says of a step's sequences that advance by chunks: columns of numbers, in the form of who attends.

A form makes a step's columns, says how long a graph's are, and makes of columns on the device what kernels take.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from torch import Tensor

from worker_svc.core.batch import Batch
from worker_svc.core.kernels.attention.latent_expanded import CONTEXT_TILE, QUERY_ROWS, ContextTiles, QueryTiles
from worker_svc.core.kernels.attention.latent_shape import LatentShape
from worker_svc.core.kernels.attention.prefill import QUERY_TILE, PrefillTiles
from worker_svc.core.slots import I64

# Of latent attention: steps of fewer tokens do not pay for two launches more a layer. What is made of contexts takes
# memory: at most of so many tokens for each of the step, or of the other number, if that is more.
_FEWEST_EXPANDED, _CONTEXTS_OF_TOKEN, _FEWEST_CONTEXTS = 256, 4, 16384
_ALL = 1 << 31  # rows: more than any step has

_NONE = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Spans:
    """Sequences that advance by chunks, one after the other; tensors are i64 on the device."""

    longest_query: int  # no chunk is longer
    longest_context: int
    starts: Tensor  # [seqs + 1]: where each one's tokens begin in the flat columns, and the end
    contexts: Tensor  # [seqs]: tokens with KV once the step is done
    slots: Tensor  # [seqs]


@dataclass(frozen=True, slots=True)
class ExpandedWork:
    """Chunks whose contexts are brought to all heads, in a step in which those of all are or none."""

    queries: QueryTiles
    contexts: ContextTiles
    num_absorbed: Tensor  # i64[1]: rows whose queries meet latents instead; these are the first
    room: int  # tokens of all contexts together


@dataclass(frozen=True, slots=True)
class LatentWork:
    """Chunks that attend to latents."""

    absorbed: PrefillTiles
    expanded: ExpandedWork | None  # None: no step of as many tokens has it


Work: TypeAlias = PrefillTiles | Spans | LatentWork


@dataclass(frozen=True, slots=True)
class Room:
    """What a step, or all that a graph carries out, has in chunks at most."""

    tokens: int
    longest_chunk: int
    longest_context: int
    chunks: int = 0  # of a graph alone, as the next
    pads: int = 0  # chunks of the dummy, without a context before them; all but the last have multiples of `QUERY_TILE`


class WorkForm(Protocol):
    """The columns of who attends in a step with some room: i64, in a fixed order."""

    def lengths(self) -> list[int]:
        """The length of each that there is room for."""

    def columns(self, batch: Batch, first: int) -> list[I64]:
        """Of the sequences of a batch from `first` on."""

    def rests(self, columns: list[I64]) -> list[int]:
        """What each is filled up with where there is room for more."""

    def work(self, columns: Sequence[Tensor]) -> Work:
        """What kernels take, of columns on the device."""


@dataclass(frozen=True, slots=True)
class TileForm:
    """Of the prefill kernel."""

    room: Room

    def lengths(self) -> list[int]:
        """Implement `WorkForm.lengths`."""
        return [_most_tiles(self.room)] * 4

    def columns(self, batch: Batch, first: int) -> list[I64]:
        """Implement `WorkForm.columns`."""
        return list(chunk_tiles(batch, first))

    def rests(self, columns: list[I64]) -> list[int]:
        """Implement `WorkForm.rests`: tiles without tokens."""
        return [0] * len(columns)

    def work(self, columns: Sequence[Tensor]) -> PrefillTiles:
        """Implement `WorkForm.work`."""
        return PrefillTiles(*columns)


@dataclass(frozen=True, slots=True)
class SpanForm:
    """Of a FlashAttention package."""

    room: Room

    def lengths(self) -> list[int]:
        """Implement `WorkForm.lengths`."""
        count = self.room.chunks + self.room.pads
        return [count + 1, count, count]

    def columns(self, batch: Batch, first: int) -> list[I64]:
        """Implement `WorkForm.columns`."""
        return [batch.query_starts[first:], batch.context_lens[first:], batch.slots[first:]]

    def rests(self, columns: list[I64]) -> list[int]:
        """Implement `WorkForm.rests`: sequences without tokens after the last."""
        return [int(column[-1]) for column in columns]

    def work(self, columns: Sequence[Tensor]) -> Spans:
        """Implement `WorkForm.work`."""
        return Spans(self.room.longest_chunk, self.room.longest_context, *columns)


@dataclass(frozen=True, slots=True)
class LatentForm:
    """Of latent attention: queries meet latents, or contexts are brought to heads of `shape`, whichever is less
    arithmetic for all chunks of a step together.
    """

    shape: LatentShape
    room: Room

    def lengths(self) -> list[int]:
        """Implement `WorkForm.lengths`."""
        tiles = _most_tiles(self.room)
        if not self._may_expand:
            return [tiles] * 4
        contexts = -(-self._most_contexts // CONTEXT_TILE) + tiles
        return [*[tiles] * 8, *[contexts] * 4, 1]

    def columns(self, batch: Batch, first: int) -> list[I64]:
        """Implement `WorkForm.columns`."""
        if not self._may_expand:
            return list(chunk_tiles(batch, first))
        contexts = batch.context_lens[first:]
        if int(contexts.sum()) > self._most_contexts or self._gain(batch.query_lens[first:], contexts) <= 0:
            return [*chunk_tiles(batch, first), *[_NONE] * 8, np.array([_ALL])]
        places = np.cumsum(contexts) - contexts
        rows, positions, lengths, owners = _tiles(batch, first, QUERY_ROWS)
        return [
            *[_NONE] * 4,
            *(rows, positions, lengths, places[owners - first]),
            *_context_tiles(batch, first, places),
            np.array([first]),
        ]

    def rests(self, columns: list[I64]) -> list[int]:
        """Implement `WorkForm.rests`: tiles without tokens."""
        return [0] * len(columns)

    def work(self, columns: Sequence[Tensor]) -> LatentWork:
        """Implement `WorkForm.work`."""
        absorbed, (queries, contexts, num_absorbed) = columns[:4], (columns[4:8], columns[8:12], columns[12:])
        if not num_absorbed:
            return LatentWork(PrefillTiles(*absorbed), None)
        expanded = ExpandedWork(QueryTiles(*queries), ContextTiles(*contexts), num_absorbed[0][:1], self._most_contexts)
        return LatentWork(PrefillTiles(*absorbed), expanded)

    @property
    def _most_contexts(self) -> int:
        """Tokens of contexts that a step may bring to heads."""
        return max(_CONTEXTS_OF_TOKEN * self.room.tokens, _FEWEST_CONTEXTS)

    @property
    def _may_expand(self) -> bool:
        return self.room.tokens >= _FEWEST_EXPANDED and self._pair_gain > 0

    @property
    def _pair_gain(self) -> int:
        """Multiplications that a pair of tokens, of a head, has less where contexts are brought to heads."""
        return 2 * self.shape.rank - self.shape.plain - self.shape.values

    def _gain(self, query_lens: I64, contexts: I64) -> int:
        """Multiplications of a head that chunks have less so; to bring a query to the latent, and what it attends to
        from there, is as much as to bring a token to keys and values.
        """
        pairs = int((query_lens * (2 * contexts - query_lens + 1)).sum()) // 2
        before = int((contexts - query_lens).sum())
        return pairs * self._pair_gain - before * self.shape.rank * (self.shape.plain + self.shape.values)


def chunk_tiles(batch: Batch, first: int) -> tuple[I64, I64, I64, I64]:
    """First rows, positions, lengths and slots of `PrefillTiles`, for the sequences of a batch from `first` on: those
    with the longest context first.
    """
    rows, positions, lengths, owners = _tiles(batch, first, QUERY_TILE)
    return rows, positions, lengths, batch.slots[owners]


def _tiles(batch: Batch, first: int, size: int) -> tuple[I64, I64, I64, I64]:
    """First rows, positions, lengths and sequences of tiles of so many tokens at most, see `chunk_tiles`."""
    query_lens = batch.query_lens[first:]
    owners, offsets = _cut(query_lens, size)
    owners += first
    left = batch.query_lens[owners] - offsets
    positions = batch.context_lens[owners] - left
    order = np.argsort(-positions, kind="stable")
    rows = batch.query_starts[owners] + offsets
    return rows[order], positions[order], np.minimum(left, size)[order], owners[order]


def _context_tiles(batch: Batch, first: int, places: I64) -> tuple[I64, I64, I64, I64]:
    """The columns of `ContextTiles`, for sequences whose contexts begin at `places`."""
    contexts = batch.context_lens[first:]
    owners, positions = _cut(contexts, CONTEXT_TILE)
    lengths = np.minimum(contexts[owners] - positions, CONTEXT_TILE)
    return positions, lengths, batch.slots[first + owners], places[owners] + positions


def _cut(lengths: I64, size: int) -> tuple[I64, I64]:
    """The index of whose part each is, and where it begins, of parts of so many at most of each of `lengths`."""
    counts = -(-lengths // size)
    owners = np.repeat(np.arange(len(lengths)), counts)
    return owners, (np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)) * size


def _most_tiles(room: Room) -> int:
    """Tiles of chunks, and of what pads a step: of `QUERY_TILE` tokens, or of more, which are fewer; the last pad and
    each chunk may end with a shorter one.
    """
    return -(-room.tokens // QUERY_TILE) + room.chunks + 2
