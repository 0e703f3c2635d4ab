"""The host's mirror of the slots: just enough to turn a plan into the arrays of a batch without asking the device."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from contract.domain.plan import U32, Admission, StepPlan
from worker_svc.core.interface import Limits, plan_error

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
F32 = npt.NDArray[np.float32]
_NONE = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class BlockUpdates:
    """Entries of block tables that a plan wrote: tables[slots[i], indices[i]] = blocks[i]."""

    slots: I64
    indices: I64
    blocks: I64


_NO_UPDATES = BlockUpdates(_NONE, _NONE, _NONE)


class HostSlots:
    """Counts and block tables of every slot, moved on by plans alone.

    num_tokens      i64[max_num_seqs]  tokens whose ids are known (sampled ones count once their step is launched)
    num_computed    i64[max_num_seqs]  tokens whose KV is written
    num_blocks      i64[max_num_seqs]  entries of the block table in use
    num_prompt      i64[max_num_seqs]  prompt tokens
    is_pooled       bool[max_num_seqs] nothing is sampled: the prompt becomes a vector
    block_tables    i64[max_num_seqs, blocks of max_model_len + 1 tokens]
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        # The token sampled after a full context is known, though never computed.
        self.max_tokens = limits.max_model_len + 1
        self.max_blocks = -(-self.max_tokens // limits.block_size)
        self.active = np.zeros(limits.max_num_seqs, np.bool_)
        self.num_tokens = np.zeros(limits.max_num_seqs, np.int64)
        self.num_computed = np.zeros(limits.max_num_seqs, np.int64)
        self.num_blocks = np.zeros(limits.max_num_seqs, np.int64)
        self.num_prompt = np.zeros(limits.max_num_seqs, np.int64)
        self.is_pooled = np.zeros(limits.max_num_seqs, np.bool_)
        self.block_tables = np.zeros((limits.max_num_seqs, self.max_blocks), np.int64)

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
        num_tokens, num_blocks = len(admission.token_ids), len(admission.block_ids)
        if not admission.num_computed_tokens < num_tokens <= self.max_tokens or not num_tokens >= (
            admission.num_prompt_tokens
        ):
            raise plan_error(
                f"slot {slot} gets {num_tokens} tokens ({admission.num_prompt_tokens} prompt, "
                f"{admission.num_computed_tokens} computed), its limit is {self.limits.max_model_len}"
            )
        if num_blocks > self.max_blocks or int(admission.token_ids.max()) >= self.limits.vocab_size:
            raise plan_error(f"slot {slot} gets more blocks than it can hold, or tokens outside the vocabulary")
        self._check_blocks(admission.block_ids)
        self.active[slot] = True
        self.num_tokens[slot] = num_tokens
        self.num_computed[slot] = admission.num_computed_tokens
        self.num_prompt[slot] = admission.num_prompt_tokens
        self.is_pooled[slot] = admission.pooling is not None
        self.num_blocks[slot] = num_blocks
        self.block_tables[slot, :num_blocks] = admission.block_ids

    def append(self, plan: StepPlan) -> BlockUpdates:
        """Put blocks after those that slots have; a slot may be named more than once."""
        if not len(plan.append_slots):
            return _NO_UPDATES
        slots = plan.append_slots.astype(np.int64)
        self._check_slots(slots)
        self._check_blocks(plan.append_blocks)
        order = np.argsort(slots, kind="stable")
        grouped = slots[order]
        rank = np.arange(len(slots)) - np.searchsorted(grouped, grouped)
        indices = np.empty_like(slots)
        indices[order] = self.num_blocks[grouped] + rank
        if indices.max() >= self.max_blocks:
            raise plan_error(f"slot {slots[indices.argmax()]} gets more blocks than its context needs")
        updates = BlockUpdates(slots, indices, plan.append_blocks.astype(np.int64))
        self.block_tables[updates.slots, updates.indices] = updates.blocks
        np.maximum.at(self.num_blocks, slots, indices + 1)
        return updates

    def check_copies(self, plan: StepPlan) -> None:
        """Raise if a plan copies blocks that are not there."""
        self._check_blocks(plan.copy_sources)
        self._check_blocks(plan.copy_targets)

    def _check_slots(self, slots: npt.NDArray[np.integer]) -> None:
        if len(slots) and (slots.max() >= self.limits.max_num_seqs or not self.active[slots].all()):
            raise plan_error("it names a slot that is empty or not there")

    def _check_blocks(self, blocks: npt.NDArray[np.integer]) -> None:
        if len(blocks) and blocks.max() >= self.limits.num_blocks:
            raise plan_error(f"block {blocks.max()} is not among the {self.limits.num_blocks} there are")
