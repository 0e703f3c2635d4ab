"""From plans and slots to batch arrays: counts, tables and the refusal of plans that contradict them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.domain.errors import PenstockError
from contract.domain.params import Sampling
from contract.domain.plan import Admission, StepPlan
from worker_svc.core.batch import advance, build_batch, tokens_of
from worker_svc.core.interface import Limits
from worker_svc.core.slots import HostSlots

LIMITS = Limits(
    num_blocks=40, block_size=4, max_num_seqs=3, max_model_len=32, max_num_batched_tokens=64, vocab_size=100
)


def u32(*values: int) -> np.ndarray:
    return np.array(values, np.uint32)


def admission(slot: int, num_tokens: int, blocks: np.ndarray, computed: int = 0) -> Admission:
    return Admission(slot, np.arange(num_tokens, dtype=np.uint32), num_tokens, computed, blocks, Sampling(), 0)


def test_a_mixed_batch_has_each_token_at_its_place() -> None:
    state = HostSlots(LIMITS)
    state.admit(admission(0, 6, u32(7, 3)))
    state.admit(admission(2, 9, u32(1, 9, 5), computed=4))
    batch = build_batch(u32(2, 0), u32(3, 6), state)
    assert batch.query_starts.tolist() == [0, 3, 9]
    assert batch.context_lens.tolist() == [7, 6]
    tokens = tokens_of(batch, state)
    assert tokens.slots.tolist() == [2] * 3 + [0] * 6
    assert tokens.positions.tolist() == [4, 5, 6, 0, 1, 2, 3, 4, 5]
    assert tokens.slot_mappings[0].tolist() == [36, 37, 38, 28, 29, 30, 31, 12, 13]
    assert batch.samples.tolist() == [1]
    assert batch.sample_positions.tolist() == [6]
    advance(batch, state)
    assert state.num_computed.tolist() == [6, 0, 7]
    assert state.num_tokens.tolist() == [7, 0, 9]


def test_appended_blocks_stand_in_the_order_of_the_plan() -> None:
    state = HostSlots(LIMITS)
    state.admit(admission(0, 6, u32(7, 3)))
    state.admit(admission(1, 2, u32(8)))
    (updates,) = state.append(StepPlan(2, append_slots=u32(1, 0, 1, 1), append_blocks=u32(20, 21, 22, 23)))
    assert updates.indices.tolist() == [1, 2, 2, 3]
    assert state.block_tables[0, 1, :4].tolist() == [8, 20, 22, 23]
    assert state.num_blocks[0, :2].tolist() == [3, 4]


@given(
    lengths=st.lists(st.integers(1, 24), min_size=1, max_size=3),
    chunk=st.integers(1, 10),
    num_outputs=st.integers(1, 5),
)
@settings(max_examples=60)
def test_chunks_cover_every_token_once_whatever_their_size(lengths: list[int], chunk: int, num_outputs: int) -> None:
    state = HostSlots(LIMITS)
    for slot, length in enumerate(lengths):
        state.admit(admission(slot, length, np.arange(slot * 8, slot * 8 + 8, dtype=np.uint32)))
    cells: dict[int, list[int]] = {slot: [] for slot in range(len(lengths))}
    sampled: dict[int, list[int]] = {slot: [] for slot in range(len(lengths))}
    while any(len(positions) < num_outputs for positions in sampled.values()):
        slots = [slot for slot in sampled if len(sampled[slot]) < num_outputs]
        num = [min(chunk, int(state.num_tokens[slot] - state.num_computed[slot])) for slot in slots]
        batch = build_batch(np.array(slots), np.array(num), state)
        tokens = tokens_of(batch, state)
        for slot, position, cell in zip(tokens.slots, tokens.positions, tokens.slot_mappings[0], strict=True):
            assert position == len(cells[int(slot)])
            cells[int(slot)].append(int(cell))
        for row, position in zip(batch.samples, batch.sample_positions, strict=True):
            sampled[int(batch.slots[row])].append(int(position))
        advance(batch, state)
    for slot, length in enumerate(lengths):
        assert sampled[slot] == list(range(length, length + num_outputs))
        assert cells[slot] == list(range(slot * 32, slot * 32 + length + num_outputs - 1))


@pytest.mark.parametrize(
    "plan",
    [
        StepPlan(2, slots=u32(1), num_tokens=u32(1)),
        StepPlan(2, slots=u32(9), num_tokens=u32(1)),
        StepPlan(2, slots=u32(0, 0), num_tokens=u32(1, 1)),
        StepPlan(2, slots=u32(0), num_tokens=u32(7)),
        StepPlan(2, slots=u32(0), num_tokens=u32(0)),
        StepPlan(2, slots=u32(2), num_tokens=u32(9)),
        StepPlan(2, released_slots=u32(1)),
        StepPlan(2, append_slots=u32(0), append_blocks=u32(40)),
        StepPlan(2, append_slots=u32(1), append_blocks=u32(4)),
        StepPlan(2, append_slots=u32(*[0] * 8), append_blocks=u32(*range(20, 28))),
        StepPlan(2, copy_sources=u32(0), copy_targets=u32(40)),
        StepPlan(2, admissions=(admission(0, 3, u32(1)),)),
        StepPlan(2, admissions=(admission(3, 3, u32(1)),)),
        StepPlan(2, admissions=(admission(1, 3, u32(1), computed=3),)),
        StepPlan(2, admissions=(admission(1, 34, u32(1)),)),
        StepPlan(2, admissions=(Admission(1, u32(100), 1, 0, u32(1), Sampling(), 0),)),
    ],
    ids=str,
)
def test_a_plan_that_contradicts_the_slots_is_refused(plan: StepPlan) -> None:
    state = HostSlots(LIMITS)
    state.admit(admission(0, 6, u32(7, 3)))
    state.admit(admission(2, 9, u32(1, 9)))  # a block short

    def carry_out() -> None:
        state.release(plan.released_slots)
        for entering in plan.admissions:
            state.admit(entering)
        state.append(plan)
        state.check_copies(plan)
        build_batch(plan.slots, plan.num_tokens, state)

    with pytest.raises(PenstockError, match="step plan is not consistent"):
        carry_out()
