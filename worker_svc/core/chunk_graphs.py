"""Small steps in which sequences advance by chunks, as CUDA graphs: one for each of a few numbers of tokens.

Launched kernel by kernel, a short prompt costs the host several times what it costs the device, and the client waits
for it. All sequences of such a step go through the prefill kernel, those that decode as chunks of one token. What is
left of a graph's tokens is a chunk of the dummy slot, in whose block nothing of anybody's is.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from worker_svc.core.attention.triton_backend import TritonAttention, chunk_tiles
from worker_svc.core.batch import Batch
from worker_svc.core.decoder import DecodeOutput
from worker_svc.core.device_slots import DeviceSlots
from worker_svc.core.interface import Limits
from worker_svc.core.kernels.prefill_attention import QUERY_TILE, PrefillTiles
from worker_svc.core.kernels.sampling import sample_tokens
from worker_svc.core.models.llama import LlamaForCausalLM
from worker_svc.core.slots import I64

SIZES = (64, 128, 256, 512)  # tokens
MAX_SEQS = 16
MAX_CONTEXT = 4096  # one program reads a whole context here: longer ones are left to kernels that split it

_NONE = np.empty(0, np.int64)
_NOTHING = Batch(_NONE, _NONE, np.zeros(1, np.int64), *[_NONE] * 6)


@dataclass(frozen=True, slots=True)
class _Columns:
    """What a graph reads; views of one tensor, which one copy fills. All i64 and as long as the graph's size wants."""

    packed: Tensor
    token_slots: Tensor
    positions: Tensor
    slot_mapping: Tensor
    tiles: PrefillTiles
    slots: Tensor
    contexts: Tensor
    last_tokens: Tensor  # of the sequences that sample, as the next two
    sample_slots: Tensor
    sample_positions: Tensor


class ChunkStep:
    """embed -> layers -> logits -> sample -> move the slots on; launches kernels and nothing else."""

    def __init__(self, model: LlamaForCausalLM, attention: TritonAttention, state: DeviceSlots, limits: Limits) -> None:
        self.state = state
        self.limits = limits
        self._model = model
        self._attention = attention

    def __call__(self, columns: _Columns) -> DecodeOutput:
        """Logits and tokens of the rows that sample; rows of the dummy slot change nothing of anybody's."""
        state = self.state
        token_ids = state.tokens[columns.token_slots, columns.positions].long()
        attention = self._attention.prepare_chunks(
            columns.tiles, columns.positions, columns.slot_mapping, state.block_tables
        )
        logits = self._model.logits(self._model.forward(token_ids, attention, columns.last_tokens))
        state.advance(columns.slots, columns.contexts)
        sampled = sample_tokens(logits, *state.draws(columns.sample_slots), columns.sample_positions)
        state.write_tokens(columns.sample_slots, columns.sample_positions, sampled)
        return DecodeOutput(logits, sampled)


class ChunkGraphs:
    """Carries out small steps; without `capture`, kernel by kernel."""

    def __init__(self, step: ChunkStep, sizes: tuple[int, ...] = SIZES) -> None:
        """Nothing is recorded yet. `sizes` are numbers of tokens, ascending."""
        self._step = step
        self._device = step.state.num_computed.device
        # The dummy's chunks are up to a tile long.
        self.sizes = sizes if step.limits.max_model_len >= QUERY_TILE else ()
        self._columns = {size: self._make_columns(size) for size in self.sizes}
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, DecodeOutput]] = {}

    @torch.inference_mode()
    def capture(self) -> None:
        """Record all graphs, largest first so that the others fit into its memory; waits for the device."""
        pool = torch.cuda.graph_pool_handle()
        for size in self.sizes[::-1]:
            columns = self._columns[size]
            columns.packed.copy_(torch.from_numpy(self._fill(size, _NOTHING)))
            # Once without a graph: kernels are compiled and cuBLAS makes its workspaces.
            self._step(columns)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                output = self._step(columns)
            self._graphs[size] = graph, output
        torch.cuda.synchronize()

    def takes(self, batch: Batch) -> bool:
        """Whether the step is small enough."""
        return (
            len(self.sizes) > 0
            and batch.num_tokens <= self.sizes[-1]
            and len(batch.slots) <= MAX_SEQS
            and int(batch.context_lens.max()) <= MAX_CONTEXT
        )

    def compute(self, batch: Batch) -> DecodeOutput:
        """Carry out a step that it `takes`; rows of the output are its samples, whose tokens are in the histories."""
        size = next(size for size in self.sizes if size >= batch.num_tokens)
        columns = self._columns[size]
        packed = torch.empty(len(columns.packed), dtype=torch.int64, pin_memory=self._device.type == "cuda")
        packed.numpy()[:] = self._fill(size, batch)
        columns.packed.copy_(packed, non_blocking=True)
        if size in self._graphs:
            graph, output = self._graphs[size]
            graph.replay()
        else:
            output = self._step(columns)
        num_samples = len(batch.samples)
        return DecodeOutput(output.logits[:num_samples], output.token_ids[:num_samples])

    def _make_columns(self, size: int) -> _Columns:
        ends = np.cumsum(_lengths(size)).tolist()
        packed = torch.zeros(ends[-1], dtype=torch.int64, device=self._device)
        columns = [packed[start:end] for start, end in pairwise([0, *ends])]
        return _Columns(
            packed=packed,
            token_slots=columns[0],
            positions=columns[1],
            slot_mapping=columns[2],
            tiles=PrefillTiles(*columns[3:7]),
            slots=columns[7],
            contexts=columns[8],
            last_tokens=columns[9],
            sample_slots=columns[10],
            sample_positions=columns[11],
        )

    def _fill(self, size: int, batch: Batch) -> I64:
        """The columns of a batch; what is left of them is the dummy's."""
        dummy_slot, limits = self._step.state.dummy_slot, self._step.limits
        offsets = np.arange(size - batch.num_tokens)
        positions = offsets % QUERY_TILE
        cells = limits.num_blocks * limits.block_size + positions % limits.block_size
        rows = batch.num_tokens + offsets[::QUERY_TILE]
        zeros, dummies = np.zeros_like(rows), np.full(len(rows), dummy_slot)
        pad_tiles = (rows, zeros, np.minimum(size - rows, QUERY_TILE), dummies)
        tiles = zip(chunk_tiles(batch, np.arange(len(batch.slots))), pad_tiles, strict=True)
        parts = [  # what each begins with, and what the rest is
            (batch.token_slots, dummy_slot),
            (np.concatenate((batch.positions, positions)), 0),
            (np.concatenate((batch.slot_mapping, cells)), 0),
            # A tile may be computed twice: the last one is none of the longest.
            *((column, int(column[-1])) for column in map(np.concatenate, tiles)),
            (batch.slots, dummy_slot),
            (batch.context_lens, 0),
            (batch.query_starts[batch.samples + 1] - 1, 0),
            (batch.slots[batch.samples], dummy_slot),
            (batch.sample_positions, 0),
        ]
        columns = []
        for (beginning, rest), length in zip(parts, _lengths(size), strict=True):
            columns += [beginning, np.full(length - len(beginning), rest)]
        return np.concatenate(columns)


def _lengths(size: int) -> list[int]:
    """Of the columns of a graph. All are even: kernels are compiled again for pointers that are not aligned."""
    num_tiles = -(-size // QUERY_TILE) + MAX_SEQS + 2
    num_tiles += num_tiles % 2
    return [size] * 3 + [num_tiles] * 4 + [MAX_SEQS] * 5
