"""Decode steps as CUDA graphs: one for each of a few batch sizes, replayed with one call.

The graphs read the slots of a batch from one buffer, which is written only when the batch is another than before; what
is left of a graph's rows goes to the dummy slot. So a step that just goes on allocates nothing on the device, unless
tokens are chosen anew after the graph; one in which blocks are appended uploads them, a few bytes.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import islice

import numpy as np
import torch

from contract.domain.params import MAX_BAD_WORD_TOKENS
from worker_svc.core.batch import Batch
from worker_svc.core.chunk_graphs import ChunkGraphs
from worker_svc.core.decode_step import DecodeStep, StepDecoder
from worker_svc.core.device_decoding import DecodeOutput
from worker_svc.core.kernels.compiling import compile_launches
from worker_svc.core.kernels.sampling.changes import Changes, Entries, Words
from worker_svc.core.sampler import Extras
from worker_svc.core.slots import I64
from worker_svc.core.transfer import upload

_SMALL = (1, 2, 4, 8, 16, 24, 32, 48, 64)
# Behind each of these sizes, the step to the next. The more rows, the more of a product is arithmetic, so that padding
# takes time and power, and cuBLAS's tiles fit some numbers of rows better; but each graph keeps logits of its own.
_STEPS = ((64, 16), (256, 32))


def batch_sizes(max_num_seqs: int) -> list[int]:
    """The sizes for which graphs are made, ascending; the last is `max_num_seqs`."""
    sizes = list(_SMALL)
    while sizes[-1] < max_num_seqs:
        sizes.append(sizes[-1] + next(step for start, step in reversed(_STEPS) if sizes[-1] >= start))
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


class DecodeGraphs(StepDecoder):
    """Implement `DeviceDecoder`; nothing can be decoded before `capture`."""

    def __init__(self, step: DecodeStep, chunks: ChunkGraphs | None = None) -> None:
        super().__init__(step)
        self._chunks = chunks
        self._dummy_slot = max_num_seqs = step.state.dummy_slot
        self._sizes = np.array(batch_sizes(max_num_seqs))
        device = step.state.num_computed.device
        self._slots = torch.full((max_num_seqs,), self._dummy_slot, dtype=torch.int64, device=device)
        self._last: I64 = np.empty(0, np.int64)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, DecodeOutput]] = {}
        self._chosen: tuple[torch.cuda.CUDAGraph, DecodeOutput]  # for `_last`, and the rows that it has

    @torch.inference_mode()
    def compile(self, num_threads: int) -> None:
        """Make all kernels of Triton's ready that `capture` records, so many at a time. They are not launched: what the
        libraries' products between them read and write is nobody's, and so is what ranks exchange, which they all do.
        """
        step = self._step.outline()

        def launch_all() -> None:
            for size in self._sizes.tolist():
                output = step(self._slots[:size])
            # What no graph does, but steps after graphs do, of logits as they are and of changed ones.
            rows, values = output.positions[:1], output.logits.new_empty(1, dtype=torch.float32)
            words = Words(rows, rows.new_empty(1, MAX_BAD_WORD_TOKENS))
            changes = Changes(Entries(rows, rows, values), words=words)
            changing = Extras(has_penalties=True, changes=changes, logprob_rows=rows)
            for extras in (Extras(has_cuts=True), changing, replace(changing, has_cuts=True)):
                self.sample(output.logits, output.slots, output.positions, extras)
            self.store(rows, rows)
            if self._chunks is not None:
                self._chunks.compile()

        compile_launches(launch_all, num_threads)
        torch.cuda.empty_cache()  # as if nothing had been: `capture` is measured

    @torch.inference_mode()
    def capture(self, num_graphs: int, observe: Callable[[int, int], None]) -> None:
        """Record so many graphs of either kind, largest first so that the others fit into its memory; waits for the
        device. With fewer than there are sizes, not every batch can be decoded.

        `observe` is told how many graphs are done, and how many there can be, before the first and after each.
        """
        shapes = self._chunks.shapes if self._chunks is not None else []
        total = len(self._sizes) + len(shapes)
        pool = torch.cuda.graph_pool_handle()
        observe(0, total)
        recorded = islice(self._chunks.capture(pool), num_graphs) if self._chunks is not None else ()
        num_chunked = 0
        for num_chunked, _ in enumerate(recorded, 1):
            observe(num_chunked, total)
        for number, size in enumerate(self._sizes[::-1][:num_graphs].tolist(), num_chunked + 1):
            self._graphs[size] = self._record(size, pool)
            observe(number, total)
        torch.cuda.synchronize()

    def _record(self, size: int, pool: "torch.cuda._POOL_HANDLE") -> tuple[torch.cuda.CUDAGraph, DecodeOutput]:
        # Once without a graph: kernels are compiled and cuBLAS makes its workspaces.
        self._step(self._slots[:size])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            output = self._step(self._slots[:size])
        return graph, output

    def decode(self, slots: I64) -> DecodeOutput:
        """Implement `DeviceDecoder.decode`."""
        if slots is not self._last:
            self._choose(slots)
        graph, output = self._chosen
        graph.replay()
        return output

    def _choose(self, slots: I64) -> None:
        """The graph for so many slots, which are told to it unless they are known already."""
        size = int(self._sizes[np.searchsorted(self._sizes, len(slots))])
        if not np.array_equal(slots, self._last):
            padded = np.full(max(size, len(self._last)), self._dummy_slot, np.int64)
            padded[: len(slots)] = slots
            (on_device,) = upload(self._slots.device, padded)
            self._slots[: len(padded)].copy_(on_device)
        self._last = slots
        graph, output = self._graphs[size]
        self._chosen = graph, output.first(len(slots))

    def compute(self, batch: Batch, rows: I64) -> DecodeOutput | None:
        """Implement `DeviceDecoder.compute`."""
        return self._chunks.compute(batch, rows) if self._chunks is not None else None
