"""What a sequence needs while it is in a slot, on the device: written when it enters, then only read and extended."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from penstock.domain.plan import U32, Admission
from worker_svc.core.batch import Batch
from worker_svc.core.sampler import Cuts, Draw, Entries, Penalties, SamplerInput, Truncation
from worker_svc.core.slots import I32, I64, BlockUpdates, HostSlots
from worker_svc.core.transfer import upload, upload_floats

_TEMPERATURE, _TOP_P, _MIN_P, _REPETITION, _PRESENCE, _FREQUENCY = range(6)
_TOP_K, _SEED, _NUM_PROMPT = range(3)
_NO_LOGPROBS = -1
_ALIGNMENT = 64  # cells

NUM_TABLES = 5  # that a sequence brings something for
SEED_COLUMN = _SEED  # of `DeviceSlots.integers`; temperatures stand first in `DeviceSlots.floats`
TOP_K_COLUMN, TOP_P_COLUMN, MIN_P_COLUMN = _TOP_K, _TOP_P, _MIN_P


class Runs:
    """Runs of cells that follow each other in `DeviceSlots.cells`, and what enters them."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self._rows: list[U32 | I32] = []
        self.num_cells = 0

    def add(self, start: int, row: U32 | I32) -> None:
        """What enters the cells from `start` on."""
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
    """Persistent tensors, indexed by slot; the one behind the last, `dummy_slot`, is for rows that pad a batch.

    tokens        i32[max_num_seqs + 1, max_model_len + 1]  every token of the sequence that is known so far
    num_computed  i64[max_num_seqs + 1]  tokens whose KV is written once what is launched is done
    block_tables  i32[max_num_seqs + 1, max_blocks]; the dummy's blocks are the one behind the last
    floats        f32[max_num_seqs + 1, 6]  temperature, top-p, min-p, repetition, presence, frequency penalty
    integers      i64[max_num_seqs + 1, 3]  top-k, seed (two's complement), prompt tokens
    """

    def __init__(self, host: HostSlots, device: torch.device) -> None:
        num_slots = host.limits.max_num_seqs
        self._host = host
        self._device = device
        self._vocab_size = host.limits.vocab_size
        self.dummy_slot = num_slots
        # All tables lie in one piece of memory, `cells` i32, so that one kernel writes what enters them.
        rows = num_slots + 1
        widths = host.max_tokens, host.max_blocks, 2, 6, 6
        self.cells, places = _pieces(device, *(rows * width for width in widths))
        self._tables = [(place.start, width) for place, width in zip(places, widths, strict=True)]
        self.entering = Runs()  # what sequences brought and nobody has written yet
        tokens, block_tables, num_computed, integers, floats = (self.cells[place] for place in places)
        self.tokens = tokens.view(rows, host.max_tokens)
        self.block_tables = block_tables.view(rows, host.max_blocks)
        self.block_tables[num_slots] = host.limits.num_blocks
        self.num_computed = num_computed.view(torch.int64)
        self.integers = integers.view(torch.int64).view(rows, 3)
        self.floats = floats.view(torch.float32).view(rows, 6)
        # The host knows what is asked for, so that a step launches only the work that some row needs.
        self._floats = np.zeros((num_slots, 6), np.float32)
        self._integers = np.zeros((num_slots, 3), np.int64)
        self._num_computed = np.zeros((num_slots, 1), np.int64)  # when they entered
        self._num_logprobs = np.full(num_slots, _NO_LOGPROBS, np.int64)
        self._has_penalties = np.zeros(num_slots, np.bool_)
        self._is_plain = np.ones(num_slots, np.bool_)  # it asks for no logprobs and no change of the logits
        self._cuts = np.zeros((3, num_slots), np.bool_)  # whether it draws by top-k, by top-p, by min-p
        self._min_tokens = np.zeros(num_slots, np.int64)  # stop ids are forbidden below this position
        self._stop_ids: dict[int, I64] = {}
        self._biases: dict[int, tuple[I64, np.ndarray]] = {}

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Take note of everything about sequences that enter their slots: `enter` writes it, or who takes it."""
        self.enter()
        num_computed, integers, floats = (
            column.view(np.int32) for column in (self._num_computed, self._integers, self._floats)
        )
        for admission in admissions:
            self._remember(admission)
            slot = admission.slot
            rows = admission.token_ids, admission.block_ids, num_computed[slot], integers[slot], floats[slot]
            for (begin, width), row in zip(self._tables, rows, strict=True):
                self.entering.add(begin + slot * width, row)

    def take_entering(self) -> Runs:
        """What has not been written yet: the taker must write it, before anything reads the tables."""
        entering, self.entering = self.entering, Runs()
        return entering

    def enter(self) -> None:
        """Write what has not been written yet."""
        if self.entering.starts:
            # Many sequences may enter at once: all of it goes up together.
            cells, values = upload(self._device, *self.take_entering().cells())
            self.cells.index_copy_(0, cells, values.view(torch.int32))

    def write_blocks(self, updates: BlockUpdates) -> None:
        """Enter blocks into the tables."""
        if len(updates.slots):
            slots, indices, blocks = upload(self._device, updates.slots, updates.indices, updates.blocks)
            self.block_tables.index_put_((slots, indices), blocks.to(torch.int32))

    def draws(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Temperatures f32[rows] and seeds i64[rows] of `slots` i64[rows]."""
        return self.floats[slots, _TEMPERATURE], self.integers[slots, _SEED]

    def advance(self, slots: Tensor, contexts: Tensor) -> None:
        """The first `contexts` i64[rows] tokens of `slots` i64[rows] are computed."""
        self.num_computed.index_copy_(0, slots, contexts)

    def write_tokens(self, slots: Tensor, positions: Tensor, token_ids: Tensor) -> None:
        """Enter sampled tokens (i64, all on the device) into the histories."""
        self.tokens.index_put_((slots, positions), token_ids.to(torch.int32))

    def cuts(self, slots: I64, positions: I64) -> Cuts | None:
        """What the tokens at `positions` need besides temperatures; None: more than `Cuts` can say, logprobs or a
        change of the logits.
        """
        if not (self._is_plain[slots] & (positions >= self._min_tokens[slots])).all():
            return None
        top_k, top_p, min_p = (bool(column.any()) for column in self._cuts[:, slots])
        return Cuts(top_k, top_p, min_p)

    def sampler_input(self, batch: Batch, slots: Tensor, positions: Tensor) -> SamplerInput:
        """What the sampling rows of `batch` ask for; `slots` and `positions` are those rows' on the device."""
        rows_slots = batch.slots[batch.samples]
        logprob_rows = np.flatnonzero(self._num_logprobs[rows_slots] != _NO_LOGPROBS)
        return SamplerInput(
            draw=self._draw(rows_slots, slots, positions),
            penalties=self._penalties(rows_slots, batch.sample_positions, slots, positions),
            bias=self._bias(rows_slots),
            forbidden=self._forbidden(rows_slots, batch.sample_positions),
            logprob_rows=upload(self._device, logprob_rows)[0] if len(logprob_rows) else None,
            num_top_logprobs=max(0, int(self._num_logprobs[rows_slots].max(initial=0))),
        )

    def num_logprobs(self, slots: I64) -> I64:
        """How many alternatives each slot wants beside its token's logprob; -1: not even that."""
        return self._num_logprobs[slots]

    def _remember(self, admission: Admission) -> None:
        slot, sampling = admission.slot, admission.sampling
        self._floats[slot] = (
            sampling.temperature,
            sampling.top_p,
            sampling.min_p,
            sampling.repetition_penalty,
            sampling.presence_penalty,
            sampling.frequency_penalty,
        )
        seed = admission.seed if admission.seed < 2**63 else admission.seed - 2**64
        self._num_computed[slot] = admission.num_computed_tokens
        self._integers[slot] = (min(sampling.top_k, self._vocab_size), seed, admission.num_prompt_tokens)
        wanted = _NO_LOGPROBS if sampling.num_logprobs is None else min(sampling.num_logprobs, self._vocab_size)
        self._num_logprobs[slot] = wanted
        self._has_penalties[slot] = (
            sampling.repetition_penalty != 1.0 or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0
        )
        stop_ids = np.array([token for token in admission.stop_token_ids if token < self._vocab_size], np.int64)
        self._stop_ids[slot] = stop_ids
        self._min_tokens[slot] = admission.num_prompt_tokens + admission.min_output_tokens if len(stop_ids) else 0
        biases = [(token, value) for token, value in sampling.logit_bias if token < self._vocab_size]
        self._biases.pop(slot, None)
        if biases:
            token_ids, values = zip(*biases, strict=True)
            self._biases[slot] = np.array(token_ids, np.int64), np.array(values, np.float32)
        self._is_plain[slot] = wanted == _NO_LOGPROBS and not self._has_penalties[slot] and not biases
        is_drawn = sampling.temperature > 0
        limits = sampling.top_k > 0, sampling.top_p < 1, sampling.min_p > 0
        self._cuts[:, slot] = [is_drawn and is_limited for is_limited in limits]

    def _draw(self, rows_slots: I64, slots: Tensor, positions: Tensor) -> Draw | None:
        floats, integers = self._floats[rows_slots], self._integers[rows_slots]
        drawn = np.flatnonzero(floats[:, _TEMPERATURE] > 0)
        if not len(drawn):
            return None
        floats, integers = floats[drawn], integers[drawn]
        truncated = np.flatnonzero((integers[:, _TOP_K] > 0) | (floats[:, _TOP_P] < 1))
        rows, truncated_rows = upload(self._device, drawn, truncated)
        slots, positions = slots[rows], positions[rows]
        truncation = None
        if len(truncated):
            top_k = integers[truncated, _TOP_K]
            truncation = Truncation(
                rows=truncated_rows,
                top_k=self.integers[slots[truncated_rows], _TOP_K],
                top_p=self.floats[slots[truncated_rows], _TOP_P],
                longest=int(top_k.max()) if top_k.all() else None,
                has_top_k=bool(top_k.any()),
                has_top_p=bool((floats[truncated, _TOP_P] < 1).any()),
            )
        # Not columns of what is looked up at once: kernels take one value behind the other.
        temperatures, seeds = self.floats[slots, _TEMPERATURE], self.integers[slots, _SEED]
        min_p = self.floats[slots, _MIN_P] if floats[:, _MIN_P].any() else None
        return Draw(rows, temperatures, seeds, positions, truncation, min_p)

    def _penalties(self, rows_slots: I64, lengths: I64, slots: Tensor, positions: Tensor) -> Penalties | None:
        punished = np.flatnonzero(self._has_penalties[rows_slots])
        if not len(punished):
            return None
        (rows,) = upload(self._device, punished)
        slots = slots[rows]
        floats = self.floats[slots]
        return Penalties(
            rows=rows,
            history=self.tokens[slots, : int(lengths[punished].max())].long(),
            lengths=positions[rows],
            num_prompt_tokens=self.integers[slots, _NUM_PROMPT],
            repetition=floats[:, _REPETITION],
            presence=floats[:, _PRESENCE],
            frequency=floats[:, _FREQUENCY],
        )

    def _bias(self, rows_slots: I64) -> Entries | None:
        if not self._biases:
            return None
        found = [(row, *self._biases[slot]) for row, slot in enumerate(rows_slots.tolist()) if slot in self._biases]
        return self._entries(found)

    def _forbidden(self, rows_slots: I64, positions: I64) -> Entries | None:
        early = np.flatnonzero(positions < self._min_tokens[rows_slots])
        found = []
        for row in early.tolist():
            stop_ids = self._stop_ids[int(rows_slots[row])]
            found.append((row, stop_ids, np.full(len(stop_ids), -np.inf, np.float32)))
        return self._entries(found)

    def _entries(self, found: list[tuple[int, I64, np.ndarray]]) -> Entries | None:
        if not found:
            return None
        rows = np.concatenate([np.full(len(token_ids), row, np.int64) for row, token_ids, _ in found])
        token_ids = np.concatenate([token_ids for _, token_ids, _ in found])
        values = np.concatenate([values for _, _, values in found])
        on_device = upload(self._device, rows, token_ids)
        return Entries(on_device[0], on_device[1], upload_floats(self._device, values))


def _pieces(device: torch.device, *sizes: int) -> tuple[Tensor, list[slice]]:
    """Zeros i32, and in them a place for each of so many cells, aligned as memory of its own would be."""
    starts = [0, *np.cumsum([-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]).tolist()]
    places = [slice(start, start + size) for start, size in zip(starts, sizes, strict=False)]
    return torch.zeros(starts[-1], dtype=torch.int32, device=device), places
