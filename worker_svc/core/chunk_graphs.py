"""Steps in which sequences advance by chunks, as CUDA graphs: one for each of some numbers of tokens and decodes.

Launched kernel by kernel, a small such step costs the host several times what it costs the device. Sequences that
advance by one token stand first, as rows of the decode kernel; the others go through the prefill kernel. What is left
of a graph's rows and tokens is the dummy slot's, in whose block nothing of anybody's is.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from worker_svc.core.attention.triton_backend import TritonAttention, chunk_tiles
from worker_svc.core.batch import Batch
from worker_svc.core.decoder import DecodeOutput
from worker_svc.core.device_slots import DeviceSlots
from worker_svc.core.interface import Limits
from worker_svc.core.kernels.decode_attention import DecodeRows
from worker_svc.core.kernels.prefill_attention import QUERY_TILE, PrefillTiles
from worker_svc.core.kernels.sampling import sample_tokens
from worker_svc.core.models.llama import LlamaForCausalLM
from worker_svc.core.slots import I64

_TOKENS = (64, 128, 192, 256, 384, 512, 640, 768, 1024, 1280, 1536, 1792, 2048, 3072, 4096, 6144, 8192)
_DECODES = (0, 16, 64)  # and as many as there are slots
_FEWEST_BESIDE_DECODES = 128  # tokens
_FEWEST_CHUNKS, _CHUNK_TOKENS = 16, 128  # there is room for chunks of that length, and for so many at least
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

    @property
    def rows(self) -> int:
        """Tokens of a step."""
        return self.decodes + self.tokens

    @property
    def chunks(self) -> int:
        """Sequences that advance by more than one token."""
        return max(_FEWEST_CHUNKS, self.tokens // _CHUNK_TOKENS)

    def has_room(self, decodes: int, chunks: int, tokens: int) -> bool:
        """For so many, the tokens in chunks."""
        return self.decodes >= decodes and self.chunks >= chunks and self.tokens >= tokens


def make_shapes(limits: Limits, num_weights: int) -> list[Shape]:
    """The shapes for a model with so many weights in its layers."""
    budget = limits.max_num_batched_tokens
    most = min(budget, int(_MOST_FLOPS / (2 * num_weights)))
    # Beside few decodes a full step has almost as many tokens in chunks.
    sizes = sorted({*_TOKENS, budget} if budget < _TOKENS[-1] else _TOKENS)
    counts = [count for count in _DECODES if count < limits.max_num_seqs] + [limits.max_num_seqs]
    return [
        Shape(count, tokens)
        for count in counts
        for tokens in sizes
        if tokens <= most and (not count or tokens >= _FEWEST_BESIDE_DECODES)
    ]


@dataclass(frozen=True, slots=True)
class _Columns:
    """What a graph reads; views of one tensor, which one copy fills. All i64 and as long as the graph's shape wants."""

    packed: Tensor
    token_slots: Tensor  # decodes first, as in the next two
    positions: Tensor
    slot_mapping: Tensor
    decode_slots: Tensor
    decode_contexts: Tensor
    tiles: PrefillTiles
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
        self.num_weights = model.config.num_layer_weights
        self._model = model

    def __call__(self, columns: _Columns) -> DecodeOutput:
        """Logits and tokens of the rows that sample; rows of the dummy slot change nothing of anybody's."""
        state = self.state
        token_ids = state.tokens[columns.token_slots, columns.positions].long()
        rows = torch.arange(len(columns.positions), device=columns.positions.device)
        num_decodes = len(columns.decode_slots)
        attention = self.attention.prepare_chunks(
            DecodeRows(rows[:num_decodes], columns.decode_slots, columns.decode_contexts),
            columns.tiles,
            rows=rows[num_decodes:],
            positions=columns.positions,
            slot_mapping=columns.slot_mapping,
            block_tables=state.block_tables,
        )
        logits = self._model.logits(self._model.forward(token_ids, attention, columns.last_tokens))
        state.advance(columns.slots, columns.contexts)
        sampled = sample_tokens(logits, *state.draws(columns.sample_slots), columns.sample_positions)
        state.write_tokens(columns.sample_slots, columns.sample_positions, sampled)
        return DecodeOutput(logits, sampled)


class ChunkGraphs:
    """Carries out small steps; without `capture`, kernel by kernel."""

    def __init__(self, step: ChunkStep, shapes: list[Shape] | None = None) -> None:
        """Nothing is recorded yet. `shapes`: those that suit the model, if not given."""
        self._step = step
        self._device = step.state.num_computed.device
        found = make_shapes(step.limits, step.num_weights) if shapes is None else sorted(shapes)
        # The dummy's chunks are up to a tile long.
        self.shapes = found if step.limits.max_model_len >= QUERY_TILE else []
        self._columns = {shape: self._make_columns(shape) for shape in self.shapes}
        self._graphs: dict[Shape, tuple[torch.cuda.CUDAGraph, DecodeOutput]] = {}

    @torch.inference_mode()
    def capture(self, pool: "torch.cuda._POOL_HANDLE") -> Iterator[Shape]:
        """Record one graph after the other in the memory `pool`, largest first."""
        for shape in sorted(self.shapes, key=lambda shape: -shape.rows):
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
        """The smallest shape that has room for a step, whose decodes stand first; None: there is none, or there is so
        much attention in it that others do it better.
        """
        num_decodes = _num_decodes(batch)
        chunks = np.arange(num_decodes, len(batch.slots))
        if not len(chunks) or self._step.attention.gains_by_flash(batch, chunks):
            return None
        num_tokens = batch.num_tokens - num_decodes
        return next((each for each in self.shapes if each.has_room(num_decodes, len(chunks), num_tokens)), None)

    def compute(self, batch: Batch) -> DecodeOutput | None:
        """Carry out a step that is small enough; rows of the output are its samples, whose tokens are in the histories.
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
        places = _places(shape)
        packed = torch.zeros(_end(places), dtype=torch.int64, device=self._device)
        columns = [packed[place] for place in places]
        return _Columns(
            packed=packed,
            token_slots=columns[0],
            positions=columns[1],
            slot_mapping=columns[2],
            decode_slots=columns[3],
            decode_contexts=columns[4],
            tiles=PrefillTiles(*columns[5:9]),
            slots=columns[9],
            contexts=columns[10],
            last_tokens=columns[11],
            sample_slots=columns[12],
            sample_positions=columns[13],
        )

    def _fill(self, shape: Shape, batch: Batch, packed: I64) -> None:
        """The columns of a batch; what is left of them is the dummy's."""
        dummy_slot, limits = self._step.state.dummy_slot, self._step.limits
        decodes = _num_decodes(batch)
        idle = shape.decodes - decodes  # rows between the decodes and the chunks
        offsets = np.arange(shape.rows - idle - batch.num_tokens)
        positions = offsets % QUERY_TILE
        cells = limits.num_blocks * limits.block_size + positions % limits.block_size
        first_rows, *tiles = chunk_tiles(batch, np.arange(decodes, len(batch.slots)))
        pad_rows = batch.num_tokens + idle + offsets[::QUERY_TILE]
        zeros = np.zeros_like(pad_rows)
        pad_tiles = (zeros, np.minimum(shape.rows - pad_rows, QUERY_TILE), zeros + dummy_slot)
        columns = [np.concatenate(both) for both in zip(tiles, pad_tiles, strict=True)]
        last_tokens = batch.query_starts[batch.samples + 1] - 1
        between, none = np.full(idle, dummy_slot), np.zeros(idle, np.int64)
        parts = [  # what each begins with, and what the rest is
            (np.concatenate((batch.token_slots[:decodes], between, batch.token_slots[decodes:])), dummy_slot),
            (np.concatenate((batch.positions[:decodes], none, batch.positions[decodes:], positions)), 0),
            (np.concatenate((batch.slot_mapping[:decodes], none, batch.slot_mapping[decodes:], cells)), 0),
            (batch.slots[:decodes], dummy_slot),
            (batch.context_lens[:decodes], 1),
            # A tile may be computed twice: the last one is none of the longest.
            *((column, int(column[-1])) for column in (np.concatenate((first_rows + idle, pad_rows)), *columns)),
            (batch.slots, dummy_slot),
            (batch.context_lens, 0),
            (last_tokens + np.where(last_tokens >= decodes, idle, 0), 0),
            (batch.slots[batch.samples], dummy_slot),
            (batch.sample_positions, 0),
        ]
        for place, (beginning, rest) in zip(_places(shape), parts, strict=True):
            middle = place.start + len(beginning)
            packed[place.start : middle] = beginning
            packed[middle : place.stop] = rest


def _num_decodes(batch: Batch) -> int:
    longer = np.flatnonzero(batch.query_lens != 1)
    return int(longer[0]) if len(longer) else len(batch.slots)


def _places(shape: Shape) -> list[slice]:
    """Of the columns, in the order of `_Columns`."""
    num_tiles = -(-shape.tokens // QUERY_TILE) + shape.chunks + 2
    num_seqs = shape.decodes + shape.chunks
    lengths = [shape.rows] * 3 + [shape.decodes] * 2 + [num_tiles] * 4 + [num_seqs] * 5
    starts = np.cumsum([0, *(length + length % _ALIGNMENT for length in lengths)]).tolist()
    return [slice(start, start + length) for start, length in zip(starts, lengths, strict=False)]


def _end(places: list[slice]) -> int:
    last: int = places[-1].stop
    return last + last % _ALIGNMENT
