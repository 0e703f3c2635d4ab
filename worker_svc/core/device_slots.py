"""The state of a sequence in a slot, on the device: written when it enters, then only read and extended."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from contract.domain.plan import U32, Admission
from worker_svc.core.kernels.state.tables import NUM_FLOATS, NUM_INTEGERS
from worker_svc.core.slot_sampling import SlotSampling
from worker_svc.core.slots import I32, I64, BlockUpdates, HostSlots, entries_of
from worker_svc.core.transfer import upload

_ALIGNMENT = 64  # cells


class Runs:
    """Runs of cells that follow each other in `DeviceSlots.cells`, and what enters them."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self._rows: list[U32 | I32] = []
        self.num_cells = 0

    def add(self, start: int, row: U32 | I32) -> None:
        """Add what enters the cells from `start` on."""
        self.starts.append(start)
        self._rows.append(row.view(np.int32))
        self.num_cells += len(row)

    def write(self, runs: I64, values: I32) -> None:
        """Fill `runs` [most, 3], of which each says in which cell it starts, where in `values` what enters begins, and
        how many follow; those that are left over are empty.
        """
        num_runs = len(self.starts)
        runs[num_runs:, 2] = 0
        if num_runs:
            lengths = self._lengths()
            runs[:num_runs, 0] = self.starts
            runs[:num_runs, 1] = np.cumsum(lengths) - lengths
            runs[:num_runs, 2] = lengths
            np.concatenate(self._rows, out=values[: self.num_cells])

    def cells(self) -> tuple[I64, I64]:
        """Each cell, and what enters it, two in a number: the last one stands there twice if they are odd."""
        lengths = self._lengths()
        ends = np.cumsum(lengths)
        cells = np.repeat(self.starts - (ends - lengths), lengths) + np.arange(ends[-1])
        values = np.concatenate(self._rows)
        if len(values) % 2:
            cells, values = np.append(cells, cells[-1]), np.append(values, values[-1])
        return cells, values.view(np.int64)

    def _lengths(self) -> I64:
        return np.array([len(row) for row in self._rows], np.int64)


class DeviceSlots:
    """Persistent tensors, indexed by slot; the one after the last, `dummy_slot`, is for rows that pad a batch.

    tokens        i32[max_num_seqs + 1, max_model_len + 1]  every token of the sequence that is known so far
    num_computed  i64[max_num_seqs + 1]  tokens whose KV is written once what is launched is done
    block_tables  i32[max_num_seqs + 1, max_blocks] by kind of layers; the dummy's blocks are the one after the last
    floats        f32[max_num_seqs + 1, NUM_FLOATS]  see `SlotSampling`
    integers      i64[max_num_seqs + 1, NUM_INTEGERS]  see `SlotSampling`
    sampling      what the host knows of the last two
    """

    def __init__(self, host: HostSlots, device: torch.device) -> None:
        num_slots = host.limits.max_num_seqs
        self._limits = host.limits
        self._device = device
        self.dummy_slot = num_slots
        # All tables lie in one piece of memory, `cells` i32, so that one kernel writes what enters them.
        rows = num_slots + 1
        num_kinds = len(host.limits.kinds)
        widths = host.max_tokens, *[host.max_blocks] * num_kinds, 2, 2 * NUM_INTEGERS, NUM_FLOATS
        self.cells, places = _pieces(device, *(rows * width for width in widths))
        self._tables = [(place.start, width) for place, width in zip(places, widths, strict=True)]
        self.entering = Runs()  # what sequences brought and nobody has written yet
        tokens, *block_tables, num_computed, integers, floats = (self.cells[place] for place in places)
        self.tokens = tokens.view(rows, host.max_tokens)
        self.block_tables = tuple(table.view(rows, host.max_blocks) for table in block_tables)
        for table in self.block_tables:
            table[num_slots] = host.limits.num_blocks * host.limits.num_pages
        self.num_computed = num_computed.view(torch.int64)
        self.integers = integers.view(torch.int64).view(rows, NUM_INTEGERS)
        self.floats = floats.view(torch.float32).view(rows, NUM_FLOATS)
        self.sampling = SlotSampling(num_slots, host.limits.vocab_size)
        self._num_computed = np.zeros((num_slots, 1), np.int64)  # when they entered

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Take note of everything about sequences that enter their slots: `enter` writes it, or who takes it."""
        self.enter()
        num_computed, integers, floats = (
            column.view(np.int32) for column in (self._num_computed, self.sampling.integers, self.sampling.floats)
        )
        for admission in admissions:
            self.sampling.remember(admission)
            slot = admission.slot
            self._num_computed[slot] = admission.num_computed_tokens
            tables = [(part.first, part.blocks) for part in entries_of(admission, self._limits)]
            others = [(0, row) for row in (num_computed[slot], integers[slot], floats[slot])]
            rows = [(0, admission.token_ids), *tables, *others]
            for (begin, width), (first, row) in zip(self._tables, rows, strict=True):
                self.entering.add(begin + slot * width + first, row)

    @property
    def num_tables(self) -> int:
        """Tables that a sequence brings something for."""
        return len(self._tables)

    def take_entering(self) -> Runs:
        """Take what has not been written yet: the taker must write it, before anything reads the tables."""
        entering, self.entering = self.entering, Runs()
        return entering

    def enter(self) -> None:
        """Write what has not been written yet."""
        if self.entering.starts:
            # Many sequences may enter at once: all of it goes up together.
            cells, values = upload(self._device, *self.take_entering().cells())
            self.cells.index_copy_(0, cells, values.view(torch.int32))

    def write_blocks(self, updates: BlockUpdates) -> None:
        """Enter blocks into the tables of a kind."""
        slots, indices, blocks = upload(self._device, updates.slots, updates.indices, updates.blocks)
        self.block_tables[updates.kind].index_put_((slots, indices), blocks.to(torch.int32))

    def advance(self, slots: Tensor, contexts: Tensor) -> None:
        """The first `contexts` i64[rows] tokens of `slots` i64[rows] are computed."""
        self.num_computed.index_copy_(0, slots, contexts)

    def write_tokens(self, slots: Tensor, positions: Tensor, token_ids: Tensor) -> None:
        """Enter sampled tokens (i64, all on the device) into the histories."""
        self.tokens.index_put_((slots, positions), token_ids.to(torch.int32))


def _pieces(device: torch.device, *sizes: int) -> tuple[Tensor, list[slice]]:
    """Zeros i32, and in them a place for each of so many cells, aligned as memory of its own would be."""
    starts = [0, *np.cumsum([-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]).tolist()]
    places = [slice(start, start + size) for start, size in zip(starts, sizes, strict=False)]
    return torch.zeros(starts[-1], dtype=torch.int32, device=device), places
