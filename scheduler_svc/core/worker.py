"""A worker as the scheduler sees it: its slots as columns, its blocks, and the plans in flight.

**Why blocks and slots are reused at once.** A worker carries out plans strictly in order. What a sequence holds when it
ends or is preempted has been touched by issued plans only; whoever gets its block or slot next is first named in a plan
that is issued later, so every read and write of the old owner has happened before. Results of the old owner that come
after that are told apart by the slot's generation.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from contract.domain.plan import StepPlan, StepResult
from contract.domain.pooling import is_done_by
from contract.domain.timeline import Start
from scheduler_svc.core.blocks import BlockManager, hash_of_kind
from scheduler_svc.core.limits import WorkerLimits
from scheduler_svc.core.planned_steps import PlannedStep, StepError
from scheduler_svc.core.prefill_only import PrefillOnly
from scheduler_svc.core.saved_states import SavedStates
from scheduler_svc.core.sequence import ScheduledRequest, SequenceState, Status
from scheduler_svc.core.stats import WorkerStats
from scheduler_svc.core.tables import Reused, TableRules

I64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
_NO_TOKEN = -1  # fills the rows of `stops`


@dataclass(slots=True)
class WorkerState:
    """One worker in one epoch.

    `num_tokens` and `num_computed_tokens` are what the worker will have once all issued plans are done, at most;
    `num_received_tokens` are those that results have told. A sequence `at_tip` has one token that is not computed: it
    samples in every step that it joins.
    """

    worker_id: str
    limits: WorkerLimits
    max_num_batched_tokens: int  # of one plan
    model_digest: bytes = b""  # of the model that it has loaded
    rules: TableRules = field(init=False)
    factors: list[int] = field(init=False)  # by kind: how much longer its blocks are than the shortest
    is_plain: bool = field(init=False)  # one block is as good as the other: all layers see all tokens, or none is kept
    blocks: BlockManager = field(init=False)
    states: SavedStates = field(init=False)  # where layers keep one
    sequences: list[SequenceState | None] = field(init=False)  # by slot
    at_tip: Mask = field(init=False)
    generation: I64 = field(init=False)  # counts the occupants of a slot
    num_tokens: I64 = field(init=False)
    num_computed_tokens: I64 = field(init=False)
    num_received_tokens: I64 = field(init=False)
    max_num_tokens: I64 = field(init=False)  # tokens at which the sequence ends by count
    capacity: I64 = field(init=False)  # tokens that its block tables hold
    gives_up_at: I64 = field(init=False)  # position from which on no token sees all of its blocks, of such kinds
    num_prompt_tokens: I64 = field(init=False)
    min_tokens: I64 = field(init=False)
    num_registered_blocks: I64 = field(init=False)  # leading blocks that were offered to the prefix cache
    num_cached_tokens: I64 = field(init=False)  # prompt tokens found in the prefix cache, until a row has told
    placed_ns: I64 = field(init=False)  # when the occupant got the slot, Unix time, until a row has told; else 0
    num_untold: int = 0  # slots of which no row has
    is_pooled: Mask = field(init=False)  # the occupant ends once its prompt is computed
    may_not_repeat: Mask = field(init=False)  # the occupant ends if it repeats itself
    is_beam: Mask = field(init=False)  # the occupant computes one step, then others of its request choose with it
    is_parked: Mask = field(init=False)  # it has, and keeps the slot
    special_slots: set[int] = field(default_factory=set)  # of those who are pooled, may not repeat, or are beams
    forking: dict[ScheduledRequest, tuple[int, ...]] = field(default_factory=dict)  # the parents of chosen beams
    chains: npt.NDArray[np.uint64] = field(init=False)
    stops: I64 = field(init=False)  # [slots, width]: EOS and stop ids
    free_slots: list[int] = field(init=False)
    released_slots: list[int] = field(default_factory=list)  # to be told in the next plan
    prefilling: dict[SequenceState, None] = field(default_factory=dict)  # not at their tip, by admission
    in_flight: deque[PlannedStep] = field(default_factory=deque)
    last_step: int = 0  # issued
    num_plain_plans: int = 0  # issued since one that computed prompts
    prefill_only: PrefillOnly = field(default_factory=PrefillOnly)
    batch_num_seqs: int = 0  # of the last plan
    batch_num_tokens: int = 0  # of the last plan
    round_trip_ns: int = 0  # of the last result: from its plan to its coming
    step_ns: int = 0  # of the last result: device time

    def __post_init__(self) -> None:
        slots = self.limits.max_num_seqs
        self.rules = TableRules(self.limits.kinds, self.limits.longest_step)
        self.factors = self.rules.factors(self.limits.block_size)
        self.is_plain = len(self.limits.kinds) <= 1 and not self.rules.give_up
        self.blocks = BlockManager(self.limits.num_blocks)
        self.states = SavedStates(slots, self.limits.num_saved_states)
        self.sequences = [None] * slots
        self.at_tip, self.is_pooled, self.may_not_repeat, self.is_beam, self.is_parked = (
            np.zeros(slots, np.bool_) for _ in range(5)
        )
        self.generation, self.capacity, self.gives_up_at, self.placed_ns = (np.zeros(slots, np.int64) for _ in range(4))
        self.num_tokens, self.num_computed_tokens, self.num_received_tokens = (
            np.zeros(slots, np.int64) for _ in range(3)
        )
        self.num_prompt_tokens, self.num_cached_tokens, self.num_registered_blocks = (
            np.zeros(slots, np.int64) for _ in range(3)
        )
        self.min_tokens, self.max_num_tokens = (np.zeros(slots, np.int64) for _ in range(2))
        self.chains = np.zeros(slots, np.uint64)
        self.stops = np.full((slots, 1), _NO_TOKEN, np.int64)
        self.free_slots = list(range(slots - 1, -1, -1))

    @property
    def num_running(self) -> int:
        """Slots in use."""
        return self.limits.max_num_seqs - len(self.free_slots)

    @property
    def has_slot(self) -> bool:
        """Return whether one more sequence may run: every one that does needs a token of the budget in each step."""
        return self.num_running < min(self.limits.max_num_seqs, self.max_num_batched_tokens)

    @property
    def has_room(self) -> bool:
        """Return whether one more sequence may find blocks, if it needs any."""
        return self.blocks.num_free > 0 or self.computes_whole_prompts

    def running(self) -> Iterator[SequenceState]:
        """The sequences in slots."""
        return (sequence for sequence in self.sequences if sequence is not None)

    def serves(self, sequence: SequenceState) -> bool:
        """Return whether the worker has the model on which the sequence's request began, if it has begun."""
        return sequence.request.model_digest in (None, self.model_digest)

    def holds(self, sequence: SequenceState) -> bool:
        """Return whether the worker could ever generate one more token of it, or compute a prompt that is pooled."""
        if not is_done_by(self.limits.model_kind, sequence.request.queued.pooling):
            return False
        room = 0 if sequence.is_pooled else 1
        return sequence.num_tokens + room <= self.limits.capacity and self.serves(sequence)

    def may_start(self, sequence: SequenceState, budget: int) -> bool:
        """Return whether a waiting sequence may get a slot in a plan that has `budget` tokens left for it."""
        return sequence.num_tokens <= budget or not self.computes_whole_prompts

    @property
    def computes_whole_prompts(self) -> bool:
        """Return whether a prompt is computed in one step, without blocks, and nothing is generated."""
        return self.limits.model_kind.computes_whole_prompts

    def decoding(self) -> I64:
        """The slots that are at their tip and do not end there by count."""
        return (self.at_tip & (self.num_tokens < self.max_num_tokens)).nonzero()[0]

    def has_blocks(self, sequence: SequenceState, reused: Reused) -> bool:
        """Return whether all tokens of a waiting sequence fit now. While others run, a hundredth of the blocks is
        left to them, so that they do not preempt at once what was admitted."""
        num_new = self.rules.num_new(sequence.num_tokens, reused)
        spare = self.limits.num_blocks // 100 if self.num_running else 0
        return self.blocks.num_free - self.blocks.num_idle(reused.blocks) >= num_new + spare

    def place(self, sequence: SequenceState, reused: Reused, now_ns: int = 0) -> int:
        """Put a sequence into a free slot, with tables for its tokens; returns the slot."""
        tables = self.rules.make(sequence.num_tokens, reused, self.blocks)
        slot = self.free_slots.pop()
        request = sequence.request
        sequence.gives_prompt_logprobs = sequence.computes_prompt_logprobs
        sequence.status, sequence.started = Status.RUNNING, True
        sequence.worker_id, sequence.slot, sequence.tables = self.worker_id, slot, tables
        self.sequences[slot] = sequence
        self.num_tokens[slot] = self.num_received_tokens[slot] = sequence.num_tokens
        self.num_computed_tokens[slot] = reused.num_tokens
        most = request.max_num_tokens(self.limits.capacity)
        self.is_beam[slot] = request.search is not None
        self.max_num_tokens[slot] = sequence.num_tokens + 1 if request.search is not None else most
        self._note_tables(sequence)
        self.num_prompt_tokens[slot] = request.num_prompt_tokens
        self.min_tokens[slot] = request.queued.stopping.min_tokens
        self.num_registered_blocks[slot] = reused.num_tokens // self.limits.block_size
        self.num_cached_tokens[slot] = 0
        self.placed_ns[slot] = now_ns
        self.num_untold += now_ns > 0
        self.is_pooled[slot] = sequence.is_pooled
        self.may_not_repeat[slot] = sequence.repetition is not None
        if self.is_pooled[slot] or self.may_not_repeat[slot] or self.is_beam[slot]:
            self.special_slots.add(slot)
        self.chains[slot] = sequence.chain
        stop_ids = request.stop_token_ids
        if len(stop_ids) > self.stops.shape[1]:
            widen = len(stop_ids) - self.stops.shape[1]
            self.stops = np.pad(self.stops, ((0, 0), (0, widen)), constant_values=_NO_TOKEN)
        self.stops[slot] = _NO_TOKEN
        self.stops[slot, : len(stop_ids)] = stop_ids
        return slot

    def vacate(self, sequence: SequenceState) -> None:
        """Take a sequence out of its slot: the next plan releases it, its blocks are free at once."""
        slot = sequence.slot
        sequence.chain = int(self.chains[slot])
        for table in sequence.tables:
            self.blocks.free(table.blocks)
        sequence.worker_id, sequence.slot, sequence.tables, sequence.prompt_issued = "", -1, (), False
        sequence.save_at = []
        self.forking.pop(sequence.request, None)
        self.sequences[slot] = None
        self.special_slots.discard(slot)
        self.at_tip[slot] = self.is_beam[slot] = self.is_parked[slot] = False
        self.generation[slot] += 1
        if self.placed_ns[slot]:
            self.placed_ns[slot] = 0
            self.num_untold -= 1
        self.prefilling.pop(sequence, None)
        self.free_slots.append(slot)
        self.released_slots.append(slot)

    def park(self, sequence: SequenceState) -> None:
        """Leave a beam that has computed its step in its slot, with its blocks: nothing is planned for it."""
        self.is_parked[sequence.slot] = True
        self.at_tip[sequence.slot] = False

    def lacking(self, decoding: I64) -> list[tuple[int, int]]:
        """The slot and kind of each block that sequences lack: those of the slots `decoding` i64[n] for their next
        token, those that compute their prompts for chunks to come."""
        short = decoding[self.num_computed_tokens[decoding] >= self.capacity[decoding]].tolist()
        if self.is_plain:
            return [(slot, 0) for slot in short]
        found = []
        for slot in short:
            position = int(self.num_computed_tokens[slot])
            found += [(slot, kind) for kind in self.rules.lacking(self.sequence_in(slot).tables, position)]
        for sequence in self.prefilling if self.rules.give_up else ():
            num_tokens = int(self.num_tokens[sequence.slot])
            found += [(sequence.slot, kind) for kind in self.rules.lacking_ahead(sequence.tables, num_tokens)]
        return found

    def num_left_to_prefill(self) -> int:
        """Tokens of begun prompts that are not planned and might be in one step."""
        num_computed, num_tokens = self.num_computed_tokens, self.num_tokens
        return sum(
            (sequence.save_at[0] if sequence.save_at else int(num_tokens[sequence.slot]))
            - int(num_computed[sequence.slot])
            for sequence in self.prefilling
        )

    def append_block(self, slot: int, kind: int) -> int:
        """Give one of the slot's tables one more block; the caller has checked that one is free."""
        (block,) = self.blocks.allocate(1)
        sequence = self.sequence_in(slot)
        sequence.tables[kind].blocks.append(block)
        if self.is_plain:
            self.capacity[slot] += self.limits.block_size
        else:
            self.capacity[slot] = self.rules.room(sequence.tables)
        return block

    def give_up_blocks(self, decoding: I64, prefilled: Iterable[SequenceState]) -> None:
        """Let go of what no token to come sees of those that a plan advances: the slots `decoding` i64[n], and
        sequences by chunks."""
        if self.is_plain:
            return
        due = decoding[self._positions(decoding) >= self.gives_up_at[decoding]].tolist()
        for sequence in (*map(self.sequence_in, due), *prefilled):
            position = int(self._positions(np.array([sequence.slot]))[0])
            for blocks in self.rules.take_unseen(sequence.tables, position):
                self.blocks.free(blocks)
            self._note_tables(sequence)

    def _positions(self, slots: I64) -> I64:
        """The first position that a plan to come may compute: a step may give a slot no token, so that the one that it
        was planned for is computed again."""
        return np.minimum(self.num_computed_tokens[slots], self.num_received_tokens[slots] - 1)

    def _note_tables(self, sequence: SequenceState) -> None:
        self.capacity[sequence.slot] = self.rules.room(sequence.tables)
        if self.rules.give_up:
            self.gives_up_at[sequence.slot] = self.rules.unseen_from(sequence.tables)

    def sequence_in(self, slot: int) -> SequenceState:
        """The occupant of a slot that is in use."""
        sequence = self.sequences[slot]
        assert sequence is not None
        return sequence

    def take_starts(self, slots: I64) -> dict[int, Start]:
        """By index into `slots`: since when those whose occupants give their first tokens have them, and why."""
        if not self.num_untold:  # as in nearly every step
            return {}
        placed_ns = self.placed_ns[slots]
        (new,) = placed_ns.nonzero()
        self.placed_ns[slots[new]] = 0
        self.num_untold -= len(new)
        reasons = {row: self.sequence_in(int(slots[row])).start_reason for row in new.tolist()}
        return {row: Start(int(placed_ns[row]), reason) for row, reason in reasons.items()}

    def register_blocks(self, sequence: SequenceState, num_tokens: int) -> None:
        """Make the full blocks among the first `num_tokens` findable; their tokens have come, their KV is planned."""
        if not self.limits.finds_prefixes:
            return
        size = self.limits.block_size
        before, full = int(self.num_registered_blocks[sequence.slot]), num_tokens // size
        hashes = sequence.hashes(size)
        for kind, factor in enumerate(self.factors):
            table = sequence.tables[kind]
            for index in range(max(table.first, before // factor), full // factor):
                block_hash = hash_of_kind(hashes[(index + 1) * factor - 1], kind)
                self.blocks.register(table.blocks[index - table.first], block_hash)
        self.num_registered_blocks[sequence.slot] = max(full, before)

    def issue(self, plan: StepPlan, tips: I64, now_ns: int) -> None:
        """Put a plan in flight; `tips` i64[sampling] are the slots that sample in it."""
        self.last_step = plan.step
        self.in_flight.append(PlannedStep(plan.step, tips, self.generation[tips], now_ns))
        self.released_slots = []
        self.batch_num_seqs, self.batch_num_tokens = len(plan.slots), int(plan.num_tokens.sum())

    def settle(self, result: StepResult, now_ns: int) -> Mask | None:
        """Take a result's plan out of flight and correct the counts where a slot got fewer tokens than planned.

        A slot that has reached its tip has one token that is not computed, however many tokens it got, none included.
        Returns bool[rows], the rows of the result whose slot still has the occupant that it was planned for; None for
        a step that was applied before.

        Raises:
            StepError: the step was never planned, comes before another, or its rows are not what was planned.
        """
        if 0 < result.step <= self.last_step - len(self.in_flight):
            return None
        planned = self.in_flight[0] if self.in_flight else None
        if planned is None or planned.step != result.step:
            expected = f"step {planned.step}" if planned else "none"
            raise StepError(self.worker_id, f"result of step {result.step} came, {expected} was expected")
        slots, counts = result.slots.astype(np.int64), result.counts.astype(np.int64)
        missing = np.zeros(len(self.sequences), np.int64)
        missing[planned.slots] = 1
        num_tokens = int(counts.sum())
        in_range = len(slots) == len(counts) and not np.count_nonzero(slots >= len(missing))
        if in_range:
            missing[slots] -= counts
        if not in_range or np.count_nonzero(missing < 0) or missing.sum() + num_tokens != len(planned.slots):
            raise StepError(self.worker_id, f"result of step {result.step} has tokens that were not planned")
        if num_tokens != len(result.token_ids):
            raise StepError(self.worker_id, f"result of step {result.step} has counts that do not match its tokens")
        stays = self.generation[planned.slots] == planned.generations
        if self.limits.has_state and (stays & (missing[planned.slots] > 0) & ~self.is_pooled[planned.slots]).any():
            why = "lacks a token, whose position cannot be computed again: states have taken it in"
            raise StepError(self.worker_id, f"result of step {result.step} {why}")
        self.in_flight.popleft()
        self.round_trip_ns = now_ns - planned.issued_ns
        self.step_ns = result.step_ns
        if num_tokens == len(planned.slots) == np.count_nonzero(stays):
            return np.ones(len(slots), np.bool_)
        alive = np.zeros(len(self.sequences), np.bool_)
        alive[planned.slots] = stays
        if num_tokens < len(planned.slots):
            short = np.where(alive, missing, 0)
            self.num_tokens -= short
            self.num_computed_tokens -= short
        return alive[slots]

    def failures(self, result: StepResult, valid: Mask) -> list[tuple[int, str]]:
        """Slots whose occupant cannot go on, and why; they are taken out of `valid`, the rows of a settled result."""
        found = []
        for row in valid.nonzero()[0].tolist() if result.failures else ():
            if (why := result.failures.get(int(result.slots[row]))) is not None:
                valid[row] = False
                found.append((int(result.slots[row]), why))
        return found

    def stats(self) -> WorkerStats:
        """A snapshot."""
        return WorkerStats(
            num_slots=self.limits.max_num_seqs,
            num_running_seqs=self.num_running,
            block_size=self.limits.block_size,
            num_blocks=self.limits.num_blocks,
            num_used_blocks=self.blocks.num_used,
            num_cached_blocks=self.blocks.num_cached,
            num_free_blocks=self.blocks.num_free,
            num_saved_states=self.limits.num_saved_states,
            num_used_states=self.states.num_used,
            num_plans_in_flight=len(self.in_flight),
            last_step=self.last_step,
            batch_num_seqs=self.batch_num_seqs,
            batch_num_tokens=self.batch_num_tokens,
            round_trip_ns=self.round_trip_ns,
            block_shares=self.blocks.map.shares(),
        )
