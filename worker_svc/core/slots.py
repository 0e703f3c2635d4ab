"""The host's mirror of the slots: just enough to turn a plan into the arrays of a batch without asking the device."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from contract.domain.kv_kinds import KVKind
from contract.domain.plan import U32, Admission, StepPlan
from worker_svc.core.interface import Limits, plan_error

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
F32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class BlockUpdates:
    """Entries of one kind's block tables that a plan wrote: tables[slots[i], indices[i]] = blocks[i]."""

    slots: I64
    indices: I64
    blocks: I64
    kind: int = 0


@dataclass(frozen=True, slots=True)
class TablePart:
    """Entries of a slot's block table, of one kind."""

    first: int  # index; those before it are never read
    blocks: U32


def entries_of(admission: Admission, limits: Limits) -> list[TablePart]:
    """The entries of all kinds, of a sequence that enters a slot."""
    parts = zip(limits.kinds, admission.tables, strict=True)
    return [
        TablePart(first * (kind.block_size // limits.block_size), _paged(blocks, kind, limits))
        for kind, (first, blocks) in parts
    ]


def _paged(blocks: U32, kind: KVKind, limits: Limits) -> U32:
    """The pages, as tables name them, of blocks of a kind: of each one as many as it has tokens for, from the first."""
    if limits.num_pages == 1:
        return blocks
    pages = np.arange(kind.block_size // limits.block_size, dtype=np.uint32)
    return (blocks[:, None] * np.uint32(limits.num_pages) + pages).ravel()


class HostSlots:
    """Counts and block tables of every slot, moved on by plans alone. Entries of tables are pages of `block_size`
    tokens, whatever the kind of layers: a block of few layers is several of them, one after the other.

    num_tokens      i64[max_num_seqs]  tokens whose ids are known (sampled ones count once their step is launched)
    num_computed    i64[max_num_seqs]  tokens whose KV is written
    num_blocks      i64[kinds, max_num_seqs]  entries of the block tables in use
    room            i64[max_num_seqs]  tokens that these hold in all kinds
    num_prompt      i64[max_num_seqs]  prompt tokens
    is_pooled       bool[max_num_seqs] nothing is sampled: the prompt becomes a vector
    block_tables    i64[kinds, max_num_seqs, blocks of max_model_len + 1 tokens]
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        # The token sampled after a full context is known, though never computed.
        self.max_tokens = limits.max_model_len + 1
        num_kinds = len(limits.kinds)
        self.max_blocks = -(-self.max_tokens // (limits.block_size * limits.num_pages)) * limits.num_pages
        self.active = np.zeros(limits.max_num_seqs, np.bool_)
        self.num_tokens = np.zeros(limits.max_num_seqs, np.int64)
        self.num_computed = np.zeros(limits.max_num_seqs, np.int64)
        self.num_blocks = np.zeros((num_kinds, limits.max_num_seqs), np.int64)
        self.room = np.zeros(limits.max_num_seqs, np.int64)
        self.num_prompt = np.zeros(limits.max_num_seqs, np.int64)
        self.is_pooled = np.zeros(limits.max_num_seqs, np.bool_)
        self.block_tables = np.zeros((num_kinds, limits.max_num_seqs, self.max_blocks), np.int64)

    def clear(self) -> None:
        """Empty every slot: a new epoch begins."""
        self.active[:] = False

    def release(self, slots: U32) -> None:
        """Empty `slots`."""
        if len(slots):
            self._check_slots(slots)
            self.active[slots] = False

    def admit(self, admission: Admission) -> None:
        """Fill a slot that is empty."""
        slot = admission.slot
        if slot >= self.limits.max_num_seqs or self.active[slot]:
            raise plan_error(f"a sequence enters slot {slot}, which is taken or not there")
        num_tokens = len(admission.token_ids)
        if not admission.num_computed_tokens < num_tokens <= self.max_tokens or not num_tokens >= (
            admission.num_prompt_tokens
        ):
            raise plan_error(
                f"slot {slot} gets {num_tokens} tokens ({admission.num_prompt_tokens} prompt, "
                f"{admission.num_computed_tokens} computed), its limit is {self.limits.max_model_len}"
            )
        if int(admission.token_ids.max()) >= self.limits.vocab_size:
            raise plan_error(f"slot {slot} gets tokens outside the vocabulary")
        self._check_blocks(admission.block_ids)
        self._check_tables(admission)
        self._check_state(admission)
        self.active[slot] = True
        self.num_tokens[slot] = num_tokens
        self.num_computed[slot] = admission.num_computed_tokens
        self.num_prompt[slot] = admission.num_prompt_tokens
        self.is_pooled[slot] = admission.pooling is not None
        for kind, part in enumerate(entries_of(admission, self.limits)):
            end = part.first + len(part.blocks)
            self.num_blocks[kind, slot] = end
            self.block_tables[kind, slot, part.first : end] = part.blocks
        self._note_room(slot)

    def append(self, plan: StepPlan) -> list[BlockUpdates]:
        """Put blocks after those that slots have; a slot may be named more than once."""
        if not len(plan.append_slots):
            return []
        slots, kinds = plan.append_slots.astype(np.int64), plan.append_kinds
        self._check_slots(slots)
        self._check_blocks(plan.append_blocks)
        if len(kinds):
            if kinds.max() >= len(self.limits.kinds):
                raise plan_error(f"it names kind {kinds.max()} of {len(self.limits.kinds)} kinds of layers")
            parts = [(kind, kinds == kind) for kind in sorted(set(kinds.tolist()))]
            updates = [self._append(kind, slots[mine], plan.append_blocks[mine]) for kind, mine in parts]
        else:
            updates = [self._append(0, slots, plan.append_blocks)]
        self._note_room(slots)
        return updates

    def _append(self, kind: int, slots: I64, blocks: U32) -> BlockUpdates:
        """Put as many pages as there are in a block after those that `slots` i64[n] have of a kind."""
        pages = _paged(blocks, self.limits.kinds[kind], self.limits).astype(np.int64)
        slots = np.repeat(slots, len(pages) // len(slots)) if len(pages) > len(slots) else slots
        order = np.argsort(slots, kind="stable")
        grouped = slots[order]
        rank = np.arange(len(slots)) - np.searchsorted(grouped, grouped)
        indices = np.empty_like(slots)
        indices[order] = self.num_blocks[kind, grouped] + rank
        if indices.max() >= self.max_blocks:
            raise plan_error(f"slot {slots[indices.argmax()]} gets more blocks than its context needs")
        self.block_tables[kind, slots, indices] = pages
        np.maximum.at(self.num_blocks[kind], slots, indices + 1)
        return BlockUpdates(slots, indices, pages, kind)

    def _note_room(self, slots: int | I64) -> None:
        self.room[slots] = self.num_blocks[:, slots].min(axis=0) * self.limits.block_size

    def check_copies(self, plan: StepPlan) -> None:
        """Raise if a plan copies blocks that are not there."""
        self._check_blocks(plan.copy_sources)
        self._check_blocks(plan.copy_targets)

    def check_saves(self, plan: StepPlan) -> None:
        """Raise if a plan saves states of slots that compute nothing in it, where none is saved, or two as one."""
        indices = plan.save_states.tolist()
        if not set(plan.save_slots.tolist()) <= set(plan.slots.tolist()):
            raise plan_error("the state of a slot that computes nothing is to be saved")
        if len(set(indices)) < len(indices):
            raise plan_error("two states are to be saved as one")
        for index in indices:
            if not self.limits.max_num_seqs <= index < self.limits.num_states:
                raise plan_error(f"a state is to be saved as {index}, which is not there")

    def _check_tables(self, admission: Admission) -> None:
        """Raise if a sequence lacks the tables of a kind, or the first blocks that its tokens see, or has too many."""
        kinds, tables, slot = self.limits.kinds, admission.tables, admission.slot
        if len(tables) != len(kinds):
            raise plan_error(f"slot {slot} gets the blocks of {len(tables)} kinds of layers, not of {len(kinds)}")
        for kind, (first, blocks) in zip(kinds, tables, strict=True):
            if first > kind.first_seen(admission.num_computed_tokens):
                raise plan_error(f"slot {slot} lacks blocks that its tokens see")
            if first + len(blocks) > self.max_blocks * self.limits.block_size // kind.block_size:
                raise plan_error(f"slot {slot} gets more blocks than it can hold")

    def _check_state(self, admission: Admission) -> None:
        """Raise if a sequence's state is not that of its computed tokens: no token can be computed twice there."""
        source, has_state = admission.source_state, self.limits.has_state
        if (source is not None) != (has_state and admission.num_computed_tokens > 0):
            raise plan_error(f"slot {admission.slot} has computed tokens without a state, or a state without these")
        if source is not None and source >= self.limits.num_states:
            raise plan_error(f"slot {admission.slot} gets state {source}, which is not there")

    def _check_slots(self, slots: npt.NDArray[np.integer]) -> None:
        if len(slots) and (slots.max() >= self.limits.max_num_seqs or not self.active[slots].all()):
            raise plan_error("it names a slot that is empty or not there")

    def _check_blocks(self, blocks: npt.NDArray[np.integer]) -> None:
        if len(blocks) and blocks.max() >= self.limits.num_blocks:
            raise plan_error(f"block {blocks.max()} is not among the {self.limits.num_blocks} there are")
