"""Steps in which sequences advance by chunks, as CUDA graphs: one for each of some numbers of tokens and decodes.

Launched kernel by kernel, such a step costs the host as much as the device, a small one several times as much.
Sequences that advance by one token stand first, as rows of the decode kernel; the others go through the prefill kernel,
or through a FlashAttention package where that gains much. What is left of a graph's rows and tokens is the dummy
slot's, in whose block nothing of anybody's is.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from worker_svc.core.attention.triton_backend import Spans, TritonAttention, chunk_spans, chunk_tiles
from worker_svc.core.batch import Batch
from worker_svc.core.decoder import DecodeOutput
from worker_svc.core.device_slots import DeviceSlots
from worker_svc.core.interface import Limits
from worker_svc.core.kernels.decode_attention import DecodeRows
from worker_svc.core.kernels.prefill_attention import QUERY_TILE, PrefillTiles
from worker_svc.core.kernels.sampling import sample_tokens
from worker_svc.core.kernels.slots import embed
from worker_svc.core.models.llama import LlamaForCausalLM
from worker_svc.core.slots import I64

_TOKENS = (64, 128, 192, 256, 384, 512, 640, 768, 1024, 1280, 1536, 1792, 2048, 3072, 4096, 6144, 8192)
_DECODES = (0, 16, 64)  # and as many as there are slots
_FEWEST_BESIDE_DECODES = 128  # tokens
_FEWEST_CHUNKS, _CHUNK_TOKENS = 16, 128  # there is room for chunks of that length, and for so many at least
_FEWEST_BY_FLASH, _FLASH_CHUNK_TOKENS = 2048, 512  # fewer tokens have so much attention behind long contexts only
_LONGEST_PAD = 2048  # of tokens that pad a step so many attend to each other, where FlashAttention attends
# A step whose products are more keeps an H200 busy for longer than its launches take.
_MOST_FLOPS = 8e12
_ALIGNMENT = 2  # of columns, in numbers: kernels are compiled again for pointers that are not aligned

_NONE = np.empty(0, np.int64)
_NOTHING = Batch(_NONE, _NONE, np.zeros(1, np.int64), *[_NONE] * 6)


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """What a graph has room for."""

    decodes: int  # sequences that advance by one token
    tokens: int  # of the sequences that advance by more
    by_flash: bool = False  # who attends for these: a FlashAttention package, or the prefill kernel

    @property
    def rows(self) -> int:
        """Tokens of a step."""
        return self.decodes + self.tokens

    @property
    def chunks(self) -> int:
        """Sequences that advance by more than one token."""
        return max(_FEWEST_CHUNKS, self.tokens // (_FLASH_CHUNK_TOKENS if self.by_flash else _CHUNK_TOKENS))

    def has_room(self, decodes: int, chunks: int, tokens: int) -> bool:
        """For so many, the tokens in chunks."""
        return self.decodes >= decodes and self.tokens >= tokens and self.chunks >= chunks


def make_shapes(limits: Limits, num_weights: int, *, with_flash: bool) -> list[Shape]:
    """The shapes for a model with so many weights in its layers, ascending; none where contexts are shorter than a tile
    of the prefill kernel: what pads a step is up to that long. `with_flash`: a package is there that can be recorded.
    """
    if limits.max_model_len < QUERY_TILE:
        return []
    budget = limits.max_num_batched_tokens
    most = min(budget, int(_MOST_FLOPS / (2 * num_weights)))
    # Beside few decodes a full step has almost as many tokens in chunks.
    sizes = [size for size in {*_TOKENS, min(budget, _TOKENS[-1])} if size <= most]
    counts = [*(count for count in _DECODES if count < limits.max_num_seqs), limits.max_num_seqs]
    rooms = [(count, size) for count in counts for size in sizes if not count or size >= _FEWEST_BESIDE_DECODES]
    own = [Shape(count, size) for count, size in rooms]
    flash = [Shape(count, size, by_flash=True) for count, size in rooms if with_flash and size >= _FEWEST_BY_FLASH]
    return sorted(own + flash)


@dataclass(frozen=True, slots=True)
class _Columns:
    """What a graph reads; views of one tensor, which one copy fills. All i64 and as long as the graph's shape wants."""

    packed: Tensor
    places: list[slice]  # in it, of the columns in the order in which they follow here
    token_slots: Tensor  # decodes first, as in the next two
    positions: Tensor
    slot_mapping: Tensor
    decode_slots: Tensor
    decode_contexts: Tensor
    work: PrefillTiles | Spans  # of the sequences that advance by chunks
    slots: Tensor  # of all sequences
    contexts: Tensor
    last_tokens: Tensor  # of the sequences that sample, as the next two
    sample_slots: Tensor
    sample_positions: Tensor


class ChunkStep:
    """embed -> layers -> logits -> sample -> move the slots on; launches kernels and nothing else."""

    def __init__(self, model: LlamaForCausalLM, attention: TritonAttention, state: DeviceSlots, limits: Limits) -> None:
        self.state = state
        self.limits = limits
        self.attention = attention
        self._model = model
        self._rows = torch.arange(limits.max_num_batched_tokens + limits.max_num_seqs, device=state.num_computed.device)

    def __call__(self, columns: _Columns) -> DecodeOutput:
        """Logits and tokens of the rows that sample; rows of the dummy slot change nothing of anybody's."""
        state = self.state
        rows = self._rows[: len(columns.positions)]
        num_decodes = len(columns.decode_slots)
        attention = self.attention.prepare_chunks(
            DecodeRows(rows[:num_decodes], columns.decode_slots, columns.decode_contexts),
            columns.work,
            rows=rows[num_decodes:],
            positions=columns.positions,
            slot_mapping=columns.slot_mapping,
            block_tables=state.block_tables,
        )
        logits = self._model.logits(self._model.transform(self._embed(columns), attention, columns.last_tokens))
        state.advance(columns.slots, columns.contexts)
        # Whoever samples has all that is before the sampled token computed.
        advance = columns.sample_slots, state
        draws = state.draws(columns.sample_slots)
        return DecodeOutput(logits, sample_tokens(logits, *draws, columns.sample_positions, advance=advance))

    def _embed(self, columns: _Columns) -> Tensor:
        table = self._model.embedding_table
        if table is not None:
            return embed(columns.token_slots, columns.positions, self.state, table)
        return self._model.embed(self.state.tokens[columns.token_slots, columns.positions].long())


class ChunkGraphs:
    """Carries out steps for which there is a shape; without `capture`, kernel by kernel."""

    def __init__(self, step: ChunkStep, shapes: list[Shape]) -> None:
        """Nothing is recorded yet."""
        self._step = step
        self._device = step.state.num_computed.device
        self.shapes = sorted(shapes)
        self._columns = {shape: self._make_columns(shape) for shape in self.shapes}
        self._graphs: dict[Shape, tuple[torch.cuda.CUDAGraph, DecodeOutput]] = {}

    @torch.inference_mode()
    def capture(self, pool: "torch.cuda._POOL_HANDLE") -> Iterator[Shape]:
        """Record one graph after the other in the memory `pool`, what needs most first: the largest, and of these that
        in which a package attends, which makes its own output.
        """
        for shape in sorted(self.shapes, key=lambda shape: (-shape.rows, not shape.by_flash)):
            columns = self._columns[shape]
            packed = torch.empty_like(columns.packed, device="cpu")
            self._fill(shape, _NOTHING, packed.numpy())
            columns.packed.copy_(packed)
            # Once without a graph: kernels are compiled and cuBLAS makes its workspaces.
            self._step(columns)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                output = self._step(columns)
            self._graphs[shape] = graph, output
            yield shape

    def shape_of(self, batch: Batch) -> Shape | None:
        """The smallest shape that has room for a step, whose decodes stand first, and in which those attend for its
        chunks who do it best; None: there is none.
        """
        num_decodes = batch.num_decodes
        chunks = np.arange(num_decodes, len(batch.slots))
        if not len(chunks):
            return None
        by_flash = self._step.attention.gains_by_flash(batch, chunks)
        room = num_decodes, len(chunks), batch.num_tokens - num_decodes
        return next((each for each in self.shapes if each.by_flash == by_flash and each.has_room(*room)), None)

    def compute(self, batch: Batch) -> DecodeOutput | None:
        """Carry out a step that has a shape; rows of the output are its samples, whose tokens are in the histories.
        None, and nothing done, for others.
        """
        shape = self.shape_of(batch)
        if shape is None:
            return None
        columns = self._columns[shape]
        packed = torch.empty(len(columns.packed), dtype=torch.int64, pin_memory=self._device.type == "cuda")
        self._fill(shape, batch, packed.numpy())
        columns.packed.copy_(packed, non_blocking=True)
        if shape in self._graphs:
            graph, output = self._graphs[shape]
            graph.replay()
        else:
            output = self._step(columns)
        num_samples = len(batch.samples)
        return DecodeOutput(output.logits[:num_samples], output.token_ids[:num_samples])

    def _make_columns(self, shape: Shape) -> _Columns:
        places = self._places(shape)
        packed = torch.zeros(_end(places), dtype=torch.int64, device=self._device)
        (
            token_slots,
            positions,
            slot_mapping,
            decode_slots,
            decode_contexts,
            *work,
            slots,
            contexts,
            last,
            samples,
            at,
        ) = (packed[place] for place in places)
        return _Columns(
            packed=packed,
            places=places,
            token_slots=token_slots,
            positions=positions,
            slot_mapping=slot_mapping,
            decode_slots=decode_slots,
            decode_contexts=decode_contexts,
            work=Spans(shape.tokens, self._step.limits.max_model_len, *work) if shape.by_flash else PrefillTiles(*work),
            slots=slots,
            contexts=contexts,
            last_tokens=last,
            sample_slots=samples,
            sample_positions=at,
        )

    def _places(self, shape: Shape) -> list[slice]:
        """See `_Columns.places`."""
        if shape.by_flash:
            num_spans = shape.chunks + -(-shape.tokens // self._longest_pad(shape))
            work = [num_spans + 1, num_spans, num_spans]
        else:
            work = [-(-shape.tokens // QUERY_TILE) + shape.chunks + 2] * 4
        lengths = [shape.rows] * 3 + [shape.decodes] * 2 + work + [shape.decodes + shape.chunks] * 5
        starts = np.cumsum([0, *(length + length % _ALIGNMENT for length in lengths)]).tolist()
        return [slice(start, start + length) for start, length in zip(starts, lengths, strict=False)]

    def _fill(self, shape: Shape, batch: Batch, packed: I64) -> None:
        """The columns of a batch; what is left of them is the dummy's."""
        dummy_slot = self._step.state.dummy_slot
        padded = self._padded(shape, batch)
        decodes, chunks = slice(shape.decodes), np.arange(shape.decodes, len(padded.slots))
        work = (chunk_spans if shape.by_flash else chunk_tiles)(padded, chunks)
        parts = [  # what each begins with, and what the rest is
            *((column, 0) for column in (padded.token_slots, padded.positions, padded.slot_mapping)),
            *((column[decodes], 0) for column in (padded.slots, padded.context_lens)),
            # A tile may be computed twice: the last one is none of the longest. Spans behind the end are empty.
            *((column, int(column[-1])) for column in work),
            (batch.slots, dummy_slot),
            (batch.context_lens, 0),
            (padded.query_starts[padded.samples + 1] - 1, 0),
            (batch.slots[batch.samples], dummy_slot),
            (batch.sample_positions, 0),
        ]
        for place, (beginning, rest) in zip(self._columns[shape].places, parts, strict=True):
            middle = place.start + len(beginning)
            packed[place.start : middle] = beginning
            packed[middle : place.stop] = rest

    def _padded(self, shape: Shape, batch: Batch) -> Batch:
        """A batch with as many decodes and tokens as the shape has: what it lacks is the dummy's."""
        dummy_slot, limits = self._step.state.dummy_slot, self._step.limits
        num_decodes = batch.num_decodes
        idle = shape.decodes - num_decodes
        num_tokens = shape.rows - idle - batch.num_tokens
        if not idle and not num_tokens:
            return batch
        longest = self._longest_pad(shape)
        lengths = np.minimum(np.arange(num_tokens, 0, -longest), longest)
        positions = np.arange(num_tokens) % longest
        cells = limits.num_blocks * limits.block_size + positions % limits.block_size
        none, ones = np.zeros(idle, np.int64), np.ones(idle, np.int64)

        def fill_up(column: I64, between: I64, behind: I64) -> I64:
            return np.concatenate((column[:num_decodes], between, column[num_decodes:], behind))

        query_lens = fill_up(batch.query_lens, ones, lengths)
        return replace(
            batch,
            slots=fill_up(batch.slots, none + dummy_slot, np.full_like(lengths, dummy_slot)),
            query_lens=query_lens,
            query_starts=np.concatenate(([0], np.cumsum(query_lens))),
            context_lens=fill_up(batch.context_lens, ones, lengths),
            token_slots=fill_up(batch.token_slots, none + dummy_slot, np.full_like(positions, dummy_slot)),
            positions=fill_up(batch.positions, none, positions),
            slot_mapping=fill_up(batch.slot_mapping, none, cells),
            samples=batch.samples + np.where(batch.samples >= num_decodes, idle, 0),
        )

    def _longest_pad(self, shape: Shape) -> int:
        """Of the chunks of the dummy's: its context is as long."""
        return min(_LONGEST_PAD, self._step.limits.max_model_len) if shape.by_flash else QUERY_TILE


def _end(places: list[slice]) -> int:
    last: int = places[-1].stop
    return last + last % _ALIGNMENT
