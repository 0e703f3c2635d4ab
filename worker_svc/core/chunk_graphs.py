"""Steps in which sequences advance by chunks, as CUDA graphs: one for each of some numbers of tokens and decodes.

Launched kernel by kernel, such a step costs the host as much as the device, a small one several times as much.
Sequences that advance by one token stand first, as rows of the decode kernel; the others go through the prefill kernel,
or through a FlashAttention package where that gains much. What is left of a graph's rows and tokens is the dummy
slot's, in whose block nothing of anybody's is.

A graph reads what the host says of the step by itself, and writes what sequences bring into the slots' tables: nothing
is launched before it, unless sequences bring more than it has room for, or get further blocks.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from worker_svc.core.attention.chunk_work import Room, Work, WorkForm
from worker_svc.core.attention.triton_backend import DECODES_BESIDE_CHUNKS, TritonAttention
from worker_svc.core.batch import Batch
from worker_svc.core.causal_lm import CausalLM
from worker_svc.core.device_decoding import DecodeOutput
from worker_svc.core.device_slots import DeviceSlots, Runs
from worker_svc.core.interface import Limits
from worker_svc.core.kernels.attention.decode import DecodeRows
from worker_svc.core.kernels.attention.prefill import QUERY_TILE
from worker_svc.core.kernels.delta.sequences import Sequences
from worker_svc.core.kernels.sampling.draw import sample_tokens
from worker_svc.core.kernels.state.inputs import chunk_inputs, draw_inputs
from worker_svc.core.kernels.state.staged import conclude, enter, receive
from worker_svc.core.slots import I64
from worker_svc.core.staging import Staging

_TOKENS = (64, 128, 192, 256, *range(384, 1537, 128), 1792, 2048, 3072, 4096, 6144, 8192)
_MOST_APART = 512  # tokens of shapes that keep rows for as many decodes as they have room for
_FLEXIBLE_ROWS, _FLEXIBLE_DECODES = range(576, 1601, 64), 64  # of those that do not, up to what a package may attend to
_FULL_PADS = 16  # rows beside a full step's, for decodes that are not there
_DECODES = (0, *DECODES_BESIDE_CHUNKS)  # and as many as there are slots
_FEWEST_BESIDE_DECODES = 128  # tokens
_FEWEST_CHUNKS, _CHUNK_TOKENS = 16, 128  # there is room for chunks of that length, and for so many at least
_FEWEST_BY_FLASH, _FLASH_CHUNK_TOKENS = 2048, 512  # fewer tokens have so much attention after long contexts only
_LONGEST_PAD = 2048  # of tokens that pad a step so many attend to each other, where FlashAttention attends
# A step whose products are more keeps an H200 busy for longer than its launches take: 24 ms where a host is busy too.
_MOST_FLOPS = 2.2e13
_ALIGNMENT = 16  # of columns, in numbers: kernels are compiled again for pointers and lengths that are not aligned

_CELLS, _CELLS_OF_TOKEN = 4096, 2  # that may enter the slots' tables: sequences may bring more than a step computes

_NONE = np.empty(0, np.int64)
_NOTHING = Batch(_NONE, _NONE, np.zeros(1, np.int64), *[_NONE] * 3)


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """The size of a graph: what it has room for."""

    decodes: int  # sequences that advance by one token
    tokens: int  # of the sequences that advance by more
    by_flash: bool = False  # who attends for these: a FlashAttention package, or the prefill kernel
    is_flexible: bool = False  # these may have the rows of decodes that are not there, all but one

    @property
    def rows(self) -> int:
        """Tokens of a step."""
        return self.decodes + self.tokens

    @property
    def chunks(self) -> int:
        """Sequences that advance by more than one token."""
        return max(_FEWEST_CHUNKS, self.tokens // (_FLASH_CHUNK_TOKENS if self.by_flash else _CHUNK_TOKENS))

    @property
    def cells(self) -> int:
        """Of all runs together."""
        return _CELLS + _CELLS_OF_TOKEN * self.tokens

    @property
    def last_tokens(self) -> int:
        """Rows whose hidden states are kept."""
        return self.decodes + self.chunks

    def has_room(self, decodes: int, chunks: int, tokens: int, kept: int = 0) -> bool:
        """For so many, the tokens in chunks, and rows whose hidden states are kept."""
        if self.is_flexible:
            tokens -= max(0, self.decodes - decodes - 1)
        has_rows = self.tokens >= tokens and self.last_tokens >= kept
        return self.decodes >= decodes and self.chunks >= chunks and has_rows


def make_shapes(
    limits: Limits, num_weights: int, *, with_flash: bool, takes_finished: Callable[[int], bool] = lambda _: False
) -> list[Shape]:
    """The shapes for a model with so many weights in its layers; none where contexts are shorter than a tile of the
    prefill kernel: what pads a step is up to that long.

    Args:
        limits: of the worker.
        num_weights: a token is multiplied with.
        with_flash: a package is there that can be recorded.
        takes_finished: see `DecodeAttention`: for so many decodes a shape may be flexible.
    """
    if limits.max_model_len < QUERY_TILE:
        return []
    budget = limits.max_num_batched_tokens
    most = min(budget, int(_MOST_FLOPS / (2 * num_weights)))
    flexible = [
        Shape(count, rows - count, is_flexible=True)
        for count in {min(_FLEXIBLE_DECODES, limits.max_num_seqs), limits.max_num_seqs}
        for rows in sorted({*_FLEXIBLE_ROWS, budget + _FULL_PADS})
        if takes_finished(count) and max(count, _MOST_APART) < rows <= min(most + _FULL_PADS, _FLEXIBLE_ROWS[-1])
    ]
    # Beside few decodes a full step has almost as many tokens in chunks.
    sizes = [size for size in {*_TOKENS, min(budget, _TOKENS[-1])} if size <= most]
    if flexible:
        sizes = [size for size in sizes if size <= _MOST_APART or size > _FLEXIBLE_ROWS[-1]]
    counts = [*(count for count in _DECODES if count < limits.max_num_seqs), limits.max_num_seqs]
    rooms = [(count, size) for count in counts for size in sizes if not count or size >= _FEWEST_BESIDE_DECODES]
    own = [Shape(count, size) for count, size in rooms]
    flash = [Shape(count, size, by_flash=True) for count, size in rooms if with_flash and size >= _FEWEST_BY_FLASH]
    return sorted(own + flash + flexible)


@dataclass(frozen=True, slots=True)
class _Columns:
    """A graph's inputs; views of one tensor, which its first kernel fills. All but the last i64, and as long as the
    graph's shape wants.
    """

    shape: Shape
    packed: Tensor
    places: list[slice]  # in it, of the columns in the order in which they follow here
    slots: Tensor  # of all sequences, decodes first, as in the next two
    contexts: Tensor  # tokens with KV once the step is done
    ends: Tensor  # where each one's tokens end among the rows
    decode_rows: (
        Tensor  # of those that advance by one token, as the next two; a flexible shape's others are the dummy's
    )
    decode_slots: Tensor
    decode_contexts: Tensor
    num_decodes: Tensor  # [1]: how many of these stand before all others
    work: Work  # of the sequences that advance by chunks
    last_tokens: Tensor  # of the sequences that sample, as the next two; after them further rows that are wanted
    sample_slots: Tensor
    sample_positions: Tensor
    runs: Tensor  # [most, 3]: of cells in the slots' tables, see `Runs.write`
    cells: Tensor  # i32: what enters them


class ChunkStep:
    """receive -> embed -> layers -> logits -> sample -> move the slots on; launches kernels and nothing else."""

    def __init__(self, model: CausalLM, attention: TritonAttention, state: DeviceSlots, limits: Limits) -> None:
        self.state = state
        self.limits = limits
        self.attention = attention
        self._model = model
        self.most_kept = 0  # rows whose hidden states any shape keeps
        self._kept: Tensor | None = None

    def outline(self) -> "ChunkStep":
        """See `CausalLM.outline`."""
        outline = ChunkStep(self._model.outline(), self.attention, self.state, self.limits)
        outline.most_kept = self.most_kept
        return outline

    def __call__(self, columns: _Columns, staging: Staging) -> DecodeOutput:
        """Logits and tokens of the rows that sample; rows of the dummy slot change nothing of anybody's. `staging` has
        what the columns are to be.
        """
        state = self.state
        receive(staging.words, staging.turn, columns.packed)
        enter(columns.runs, columns.cells, state)
        table, block_size = self._model.embedding_table, self.limits.block_size
        num_rows = columns.shape.rows
        inputs = chunk_inputs(num_rows, columns.slots, columns.contexts, columns.ends, state, block_size, table)
        attention = self.attention.prepare_chunks(
            DecodeRows(columns.decode_rows, columns.decode_slots, columns.decode_contexts),
            columns.num_decodes,
            columns.work,
            Sequences(columns.slots, columns.contexts, columns.ends),
            positions=inputs.positions,
            slot_mappings=inputs.slot_mappings,
            block_tables=state.block_tables,
        )
        hidden = inputs.hidden if inputs.hidden is not None else self._model.embed(inputs.token_ids)
        hidden = self._model.transform(hidden, attention, columns.last_tokens)
        logits, kept = self._model.logits(hidden), self._keep(hidden)
        conclude(staging.turn, staging.num_done, columns.slots, columns.contexts, state)
        # Whoever samples has all that is before the sampled token computed.
        advance = columns.sample_slots, state
        asked = draw_inputs(columns.sample_slots, state)
        token_ids = sample_tokens(logits, asked.temperatures, asked.seeds, columns.sample_positions, advance=advance)
        return DecodeOutput(logits, token_ids, columns.sample_slots, columns.sample_positions, kept)

    def _keep(self, hidden: Tensor) -> Tensor:
        """Hidden states where all shapes keep theirs: a graph's own would take memory from what is recorded later."""
        if self._kept is None:
            self._kept = hidden.new_empty(self.most_kept, hidden.shape[1])
        return self._kept[: len(hidden)].copy_(hidden)


class ChunkGraphs:
    """Carries out steps for which there is a shape; without `capture`, kernel by kernel."""

    def __init__(self, step: ChunkStep, shapes: list[Shape]) -> None:
        """Nothing is recorded yet."""
        self._step = step
        self._device = step.state.num_computed.device
        self.shapes = sorted(shapes, key=lambda shape: (shape.rows, shape))
        step.most_kept = max((shape.last_tokens for shape in shapes), default=0)
        self._columns = {shape: self._make_columns(shape) for shape in self.shapes}
        most = max((len(each.packed) for each in self._columns.values()), default=0)
        self._staging = Staging(self._device, most)
        self._graphs: dict[Shape, tuple[torch.cuda.CUDAGraph, DecodeOutput]] = {}

    def compile(self) -> None:
        """See `DecodeGraphs.compile`; a package's attention compiles by itself."""
        step = self._step.outline()
        for shape in self.shapes:
            if not shape.by_flash:
                step(self._columns[shape], self._staging)

    @torch.inference_mode()
    def capture(self, pool: "torch.cuda._POOL_HANDLE") -> Iterator[Shape]:
        """Record one graph after the other in the memory `pool`, what needs most first: the largest, and of these that
        in which a package attends, which makes its own output.
        """
        for shape in sorted(self.shapes, key=lambda shape: (-shape.rows, not shape.by_flash)):
            columns, staging = self._columns[shape], self._staging
            self._fill(shape, _NOTHING, _NONE, Runs())
            # Once without a graph: kernels are compiled and cuBLAS makes its workspaces.
            self._step(columns, staging)
            staging.launched()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                output = self._step(columns, staging)
            self._graphs[shape] = graph, output
            yield shape

    def shape_of(self, batch: Batch, num_rows: int = 0) -> Shape | None:
        """The smallest shape that has room for a step, whose decodes stand first, and for so many rows beside those
        that sample, and in which those attend for its chunks who do it best; None: there is none.
        """
        num_decodes = batch.num_decodes
        num_chunks = len(batch.slots) - num_decodes
        if not num_chunks:
            return None
        by_flash = self._step.attention.gains_by_flash(batch, num_decodes)
        room = num_decodes, num_chunks, batch.num_tokens - num_decodes, len(batch.samples) + num_rows
        return next((each for each in self.shapes if each.by_flash == by_flash and each.has_room(*room)), None)

    def compute(self, batch: Batch, rows: I64 = _NONE) -> DecodeOutput | None:
        """Carry out a step that has a shape; rows of the output are its samples, whose tokens are in the histories, and
        its hidden states are theirs and those of `rows` i64[n] of the batch. None, and nothing done, for others.
        """
        shape = self.shape_of(batch, len(rows))
        if shape is None:
            return None
        state, staging = self._step.state, self._staging
        entering = state.entering
        if len(entering.starts) > self._num_runs(shape) or entering.num_cells > shape.cells:
            state.enter()
        self._fill(shape, batch, rows, state.take_entering())
        if shape in self._graphs:
            graph, output = self._graphs[shape]
            graph.replay()
        else:
            output = self._step(self._columns[shape], staging)
        staging.launched()
        return output.first(len(batch.samples))

    def _make_columns(self, shape: Shape) -> _Columns:
        places = self._places(shape)
        packed = torch.zeros(_aligned(places[-1].stop), dtype=torch.int64, device=self._device)
        columns = iter([packed[place] for place in places])
        slots, contexts, ends = islice(columns, 3)
        decode_rows, decode_slots, decode_contexts, num_decodes = islice(columns, 4)
        *work, last_tokens, sample_slots, sample_positions, runs, cells = columns
        return _Columns(
            shape=shape,
            packed=packed,
            places=places,
            slots=slots,
            contexts=contexts,
            ends=ends,
            decode_rows=decode_rows,
            decode_slots=decode_slots,
            decode_contexts=decode_contexts,
            num_decodes=num_decodes[:1],
            work=self._form(shape).work(work),
            last_tokens=last_tokens,
            sample_slots=sample_slots,
            sample_positions=sample_positions,
            runs=runs.view(self._num_runs(shape), 3),
            cells=cells.view(torch.int32),
        )

    def _places(self, shape: Shape) -> list[slice]:
        """See `_Columns.places`."""
        lengths = [shape.decodes + shape.chunks + self._num_pads(shape)] * 3 + [shape.decodes] * 3 + [1]
        lengths += self._form(shape).lengths()
        lengths += [shape.last_tokens] * 3
        lengths += [3 * self._num_runs(shape), shape.cells // 2]
        starts = np.cumsum([0, *map(_aligned, lengths)]).tolist()
        return [slice(start, start + length) for start, length in zip(starts, lengths, strict=False)]

    def _num_runs(self, shape: Shape) -> int:
        """Of cells that enter the slots' tables: as many sequences as there are chunks bring theirs."""
        return self._step.state.num_tables * shape.chunks

    def _fill(self, shape: Shape, batch: Batch, rows: I64, entering: Runs) -> None:
        """Write the columns of a batch and of the rows that are wanted beside its samples, of which what is left is the
        dummy's, and what enters the tables.
        """
        words, places = self._staging.next(), self._columns[shape].places
        dummy_slot = self._step.state.dummy_slot
        num_decodes = batch.num_decodes if shape.is_flexible else shape.decodes
        padded = self._padded(shape, batch, num_decodes)
        rows = rows + np.where(rows >= batch.num_decodes, num_decodes - batch.num_decodes, 0)
        form = self._form(shape)
        work = form.columns(padded, num_decodes)
        parts = [  # what each begins with, and what the rest is
            (padded.slots, dummy_slot),
            (padded.context_lens, 0),
            (padded.query_starts[1:], shape.rows),
            (np.arange(num_decodes), shape.rows - 1),
            (padded.slots[:num_decodes], dummy_slot),
            (padded.context_lens[:num_decodes], 1),
            (np.array([num_decodes]), 0),
            *zip(work, form.rests(work), strict=True),
            (np.concatenate((padded.query_starts[padded.samples + 1] - 1, rows)), 0),
            (padded.slots[padded.samples], dummy_slot),
            (padded.sample_positions, 0),
        ]
        for place, (beginning, rest) in zip(places, parts, strict=False):
            middle = place.start + len(beginning)
            words[place.start : middle] = beginning
            words[middle : place.stop] = rest
        runs, cells = (words[place] for place in places[-2:])
        entering.write(runs.reshape(-1, 3), cells.view(np.int32))

    def _padded(self, shape: Shape, batch: Batch, most_decodes: int) -> Batch:
        """A batch with so many decodes, and as many tokens as the shape has: what it lacks is the dummy's."""
        dummy_slot = self._step.state.dummy_slot
        num_decodes = batch.num_decodes
        idle = most_decodes - num_decodes
        num_tokens = shape.rows - idle - batch.num_tokens
        if not idle and not num_tokens:
            return batch
        longest = self._longest_pad(shape)
        lengths = np.minimum(np.arange(num_tokens, 0, -longest), longest)
        ones = np.ones(idle, np.int64)

        def fill_up(column: I64, between: I64, behind: I64) -> I64:
            return np.concatenate((column[:num_decodes], between, column[num_decodes:], behind))

        query_lens = fill_up(batch.query_lens, ones, lengths)
        return replace(
            batch,
            slots=fill_up(batch.slots, np.full_like(ones, dummy_slot), np.full_like(lengths, dummy_slot)),
            query_lens=query_lens,
            query_starts=np.concatenate(([0], np.cumsum(query_lens))),
            context_lens=fill_up(batch.context_lens, ones, lengths),
            samples=batch.samples + np.where(batch.samples >= num_decodes, idle, 0),
        )

    def _form(self, shape: Shape) -> WorkForm:
        room = Room(
            _most_tokens(shape), shape.tokens, self._step.limits.max_model_len, shape.chunks, self._num_pads(shape)
        )
        return self._step.attention.form(room, by_flash=shape.by_flash)

    def _num_pads(self, shape: Shape) -> int:
        """Chunks of the dummy's, at most."""
        return -(-_most_tokens(shape) // self._longest_pad(shape))

    def _longest_pad(self, shape: Shape) -> int:
        """Of the chunks of the dummy's: its context is as long."""
        return min(_LONGEST_PAD, self._step.limits.max_model_len) if shape.by_flash else QUERY_TILE


def _aligned(length: int) -> int:
    return -(-length // _ALIGNMENT) * _ALIGNMENT


def _most_tokens(shape: Shape) -> int:
    """In chunks."""
    return shape.rows if shape.is_flexible else shape.tokens
