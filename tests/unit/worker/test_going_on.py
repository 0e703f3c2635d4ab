"""A batch that plans go on with: when a plan may, and that the slots' counts are moved as any plan moves them."""

import copy
import sys

import numpy as np
import pytest

from contract.domain.params import Sampling
from contract.domain.plan import Admission, StepPlan
from worker_svc.core.batch import advance, build_batch
from worker_svc.core.continuation import Continuation
from worker_svc.core.interface import Limits
from worker_svc.core.slots import HostSlots

LIMITS = Limits(
    num_blocks=64, block_size=4, max_num_seqs=8, max_model_len=24, max_num_batched_tokens=64, vocab_size=100
)
SLOTS = np.array([5, 1, 2], np.uint32)
ONES = np.ones(3, np.uint32)


def column(*values: int) -> np.ndarray:
    return np.array(values, np.uint32)


def decoding(num_alike: int = sys.maxsize) -> tuple[HostSlots, StepPlan, Continuation]:
    """Three sequences of 6, 7 and 8 known tokens of which one is to be computed, and a step of theirs launched; of the
    sampler they ask the same for so many steps.
    """
    state = HostSlots(LIMITS)
    for number, slot in enumerate(SLOTS.tolist()):
        tokens = np.arange(6 + number, dtype=np.uint32)
        blocks = np.arange(3, dtype=np.uint32) + 3 * number
        state.admit(Admission(slot, tokens, len(tokens), len(tokens) - 1, blocks, Sampling(temperature=0.0), seed=0))
    plan = StepPlan(2, slots=SLOTS, num_tokens=ONES)
    batch = build_batch(SLOTS, ONES, state, longest_first=True)
    advance(batch, state)
    return state, plan, Continuation(plan, batch, state, num_alike)


def test_goes_on_as_long_as_there_is_room_and_moves_the_counts_like_any_batch() -> None:
    state, _, going_on = decoding()
    other = copy.deepcopy(state)
    step = 3
    while going_on.covers(StepPlan(step, slots=SLOTS, num_tokens=ONES)):
        going_on.advance()
        advance(build_batch(SLOTS, ONES, other), other)
        step += 1
    # The longest had 8 tokens computed, and room for 12.
    assert step == 3 + 4
    assert (state.num_computed == other.num_computed).all()
    assert (state.num_tokens == other.num_tokens).all()


def test_keeps_the_order_in_which_the_batch_was_built() -> None:
    _, _, going_on = decoding()
    assert going_on.slots.tolist() == [2, 1, 5]


def test_goes_on_as_long_as_the_sampler_is_asked_for_the_same() -> None:
    _, _, going_on = decoding(num_alike=3)
    for step in (3, 4):
        assert going_on.covers(StepPlan(step, slots=SLOTS, num_tokens=ONES))
        going_on.advance()
    assert not going_on.covers(StepPlan(5, slots=SLOTS, num_tokens=ONES))


def test_blocks_that_a_plan_appends_make_room() -> None:
    state, _, going_on = decoding()
    for step in range(3, 7):
        assert going_on.covers(StepPlan(step, slots=SLOTS, num_tokens=ONES))
        going_on.advance()
    plan = StepPlan(7, slots=SLOTS, num_tokens=ONES, append_slots=column(2), append_blocks=column(40))
    assert not going_on.covers(StepPlan(7, slots=SLOTS, num_tokens=ONES))
    state.append(plan)
    assert going_on.covers(plan)


def test_no_block_makes_room_beyond_the_context() -> None:
    state, _, going_on = decoding()
    steps = 0
    while True:
        plan = StepPlan(3 + steps, slots=SLOTS, num_tokens=ONES)
        if state.num_computed[2] == state.room[2] and state.num_blocks[0, 2] < 6:
            more = column(50 + steps, 30 + steps, 20 + steps)
            plan = StepPlan(3 + steps, slots=SLOTS, num_tokens=ONES, append_slots=SLOTS, append_blocks=more)
            state.append(plan)
        if not going_on.covers(plan):
            break
        going_on.advance()
        steps += 1
    assert state.num_computed[2] == LIMITS.max_model_len


@pytest.mark.parametrize(
    "plan",
    [
        StepPlan(1, slots=SLOTS, num_tokens=ONES),
        StepPlan(3, slots=SLOTS[:2], num_tokens=ONES[:2]),
        StepPlan(3, slots=column(5, 1, 3), num_tokens=ONES),
        StepPlan(3, slots=SLOTS, num_tokens=column(1, 1, 2)),
        StepPlan(3, slots=SLOTS, num_tokens=ONES, released_slots=column(7)),
        StepPlan(
            3,
            slots=SLOTS,
            num_tokens=ONES,
            admissions=(Admission(3, column(1, 2), 2, 0, column(60), Sampling(temperature=0.0), seed=0),),
        ),
    ],
    ids=["a new epoch", "fewer", "others", "more tokens", "a release", "an admission"],
)
def test_any_other_plan_is_built_anew(plan: StepPlan) -> None:
    _, _, going_on = decoding()
    assert not going_on.covers(plan)
