"""A plan in the making."""

from dataclasses import dataclass, field

import numpy as np

from contract.domain.plan import NO_TOKENS, U32, Admission, StepPlan
from scheduler_svc.core.sequence import SequenceState
from scheduler_svc.core.tables import Reused, Tables, held_blocks
from scheduler_svc.core.worker import I64, WorkerState


@dataclass(slots=True)
class PlanDraft:
    """The part of a plan that is not decoding."""

    admissions: list[Admission] = field(default_factory=list)
    appended: list[tuple[int, int]] = field(default_factory=list)  # (slot, block)
    append_kinds: list[int] = field(default_factory=list)  # of each of these, the kind of layers
    copied: list[tuple[int, int]] = field(default_factory=list)  # (source, target)
    chunks: dict[SequenceState, int] = field(default_factory=dict)  # tokens of each sequence, as they were planned
    held: list[list[int]] = field(default_factory=list)  # blocks to be let go of once it is made
    saved: list[tuple[int, int]] = field(default_factory=list)  # (slot, index of a state)
    has_preempted: bool = False

    def admit(self, sequence: SequenceState, reused: Reused) -> None:
        """Tell the worker of a sequence that was placed, with what it has of it."""
        request = sequence.request
        for source, table, shared in zip(reused.copy_sources, sequence.tables, reused.tables, strict=True):
            if source is not None:
                self.copied.append((source, table.blocks[len(shared.blocks)]))
        counts, firsts = _shape_of(sequence.tables)
        self.admissions.append(
            Admission(
                slot=sequence.slot,
                token_ids=sequence.token_ids(),
                num_prompt_tokens=request.num_prompt_tokens,
                num_computed_tokens=reused.num_tokens,
                block_ids=np.array(held_blocks(sequence.tables), np.uint32),
                sampling=request.sampling,
                seed=sequence.seed,
                min_output_tokens=request.queued.stopping.min_tokens if request.search is None else 0,
                stop_token_ids=request.stop_token_ids,
                request_id=request.request_id,
                eos_token_ids=request.queued.eos_token_ids if request.queued.sampling.grammar else (),
                prompt_logprobs=sequence.gives_prompt_logprobs,
                pooling=request.queued.pooling,
                num_first_tokens=request.queued.num_first_tokens,
                block_counts=counts,
                first_blocks=firsts,
                source_state=reused.state,
            )
        )

    def append(self, worker: WorkerState, lacking: list[tuple[int, int]]) -> None:
        """Give slots one more block each, of a kind of layers; the caller has checked that there are as many free."""
        self.appended = [(slot, worker.append_block(slot, kind)) for slot, kind in lacking]
        self.append_kinds = [kind for _, kind in lacking]

    def let_go(self, worker: WorkerState) -> None:
        """Let go of the blocks that were held until the plan is made."""
        for blocks in self.held:
            worker.blocks.free(blocks)

    def advance(self, worker: WorkerState, sequence: SequenceState, budget: int) -> int:
        """Plan a sequence's next chunk, or more of the one that it has, at most `budget` tokens; returns how many."""
        slot = sequence.slot
        num_left = int(worker.num_tokens[slot] - worker.num_computed_tokens[slot])
        num_tokens = min(num_left, budget)
        if sequence.save_at:
            num_tokens = min(num_tokens, _num_until_save(worker, sequence))
        if num_tokens == 0:
            return 0
        worker.num_computed_tokens[slot] += num_tokens
        if num_tokens == num_left:
            worker.num_tokens[slot] += 1
            worker.at_tip[slot] = True
            worker.prefilling.pop(sequence, None)
        else:
            worker.prefilling[sequence] = None
        self.chunks[sequence] = self.chunks.get(sequence, 0) + num_tokens
        return num_tokens

    def save_states(self, worker: WorkerState) -> None:
        """Have the states saved of those sequences that get as far as theirs is to be saved."""
        for sequence in self.chunks:
            if sequence.save_at and sequence.save_at[0] == int(worker.num_computed_tokens[sequence.slot]):
                block_hash = sequence.hash_before(sequence.save_at.pop(0), worker.limits.block_size)
                if len(self.saved) < worker.limits.num_saved_states:
                    index = worker.states.save(block_hash)
                    self.saved += [(sequence.slot, index)] if index is not None else []

    def plan(self, step: int, released_slots: list[int], decoding: I64) -> StepPlan:
        """The plan: the slots `decoding` i64[num_decoding], a token each, and after them those of the chunks."""
        append_slots, append_blocks = _columns(self.appended)
        copy_sources, copy_targets = _columns(self.copied)
        save_slots, save_states = _columns(self.saved)
        slots, num_tokens = decoding.astype(np.uint32), np.ones(len(decoding), np.uint32)
        if self.chunks:
            chunks = np.array([(sequence.slot, num) for sequence, num in self.chunks.items()], np.uint32)
            slots, num_tokens = np.concatenate((slots, chunks[:, 0])), np.concatenate((num_tokens, chunks[:, 1]))
        return StepPlan(
            step=step,
            released_slots=np.array(released_slots, np.uint32) if released_slots else NO_TOKENS,
            admissions=tuple(self.admissions),
            append_slots=append_slots,
            append_blocks=append_blocks,
            append_kinds=np.array(self.append_kinds, np.uint32) if any(self.append_kinds) else NO_TOKENS,
            copy_sources=copy_sources,
            copy_targets=copy_targets,
            slots=slots,
            num_tokens=num_tokens,
            save_slots=save_slots,
            save_states=save_states,
        )


def _num_until_save(worker: WorkerState, sequence: SequenceState) -> int:
    """Tokens up to where a sequence's state is to be saved: it need not be where another has saved it meanwhile."""
    num_computed, points = int(worker.num_computed_tokens[sequence.slot]), sequence.save_at
    while points and points[0] > num_computed:
        known = worker.states.found.get(sequence.hash_before(points[0], worker.limits.block_size))
        if known is None:
            break
        worker.states.use(known)
        points.pop(0)
    return (points[0] if points else int(worker.num_tokens[sequence.slot])) - num_computed


def _shape_of(tables: Tables) -> tuple[U32, U32]:
    """By kind, the number of blocks and of those before them; empty if there is one table, and all of it, or none."""
    if not tables or (len(tables) == 1 and not tables[0].first):
        return NO_TOKENS, NO_TOKENS
    counts, firsts = zip(*((len(table.blocks), table.first) for table in tables), strict=True)
    return np.array(counts, np.uint32), np.array(firsts, np.uint32)


def _columns(pairs: list[tuple[int, int]]) -> tuple[U32, U32]:
    """Pairs as two columns."""
    if not pairs:
        return NO_TOKENS, NO_TOKENS
    table = np.array(pairs, np.uint32)
    return np.ascontiguousarray(table[:, 0]), np.ascontiguousarray(table[:, 1])
