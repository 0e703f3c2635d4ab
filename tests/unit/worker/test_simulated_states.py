"""The simulated runner with layers that keep a state: its tokens are those of any other, unless a state is of other
tokens than those that are computed."""

from dataclasses import replace

import numpy as np
import pytest
from plans import Drive, drive
from test_simulated import LIMITS, PROMPT, Clock, admission, expect, u32

from contract.domain.errors import PenstockError
from contract.domain.plan import StepPlan
from worker_svc.core.simulated import SimulatedConfig, SimulatedRunner
from worker_svc.loading import load_worker
from worker_svc.settings import WorkerSettings

WITH_STATE = replace(LIMITS, has_state=True, num_saved_states=2)


def make_runner(**changes: int) -> SimulatedRunner:
    clock = Clock()
    return SimulatedRunner(WITH_STATE, SimulatedConfig(0.0, **changes), clock.read, clock.sleep)


def test_tokens_do_not_hang_on_states() -> None:
    drives = [Drive(list(range(3, 3 + length)), 12) for length in (1, 17, 30)]
    drive(make_runner(), drives, chunk=7, window=2, stagger=1)
    assert [each.output for each in drives] == [expect(12, each.token_ids) for each in drives]


def begin(runner: SimulatedRunner) -> None:
    entering = admission(block_ids=u32(0, 1, 2, 3))
    runner.launch(StepPlan(1, admissions=(entering,), slots=u32(0), num_tokens=u32(10)))


def go_on(runner: SimulatedRunner, **changes: object) -> list[int]:
    """As a beam: in slot 1 or 0, from what slot 0 has."""
    tokens = [*PROMPT, *expect(1)]
    fields = {"slot": 1, "tokens": tokens, "computed": 10, "block_ids": u32(0, 1, 2, 3), "source_state": 0, **changes}
    plan = StepPlan(2, u32(0), (admission(**fields),), slots=u32(fields["slot"]), num_tokens=u32(1))
    return runner.launch(plan).result().token_ids.tolist()


def test_what_a_sequence_before_has_left_in_a_slot_does_not_matter() -> None:
    runner = make_runner()
    begin(runner)
    again = admission(tokens=PROMPT[::-1], block_ids=u32(4, 5, 6))
    plan = StepPlan(2, u32(0), (again,), slots=u32(0), num_tokens=u32(10))
    assert runner.launch(plan).result().token_ids.tolist() == expect(1, PROMPT[::-1])


def test_the_settings_of_a_simulated_worker_say_it() -> None:
    for has_state in (False, True):
        settings = WorkerSettings(model="model", runner="simulated", simulated_state=has_state)
        limits = load_worker(settings).runner.limits
        assert (limits.has_state, limits.num_saved_states) == (has_state, 256 if has_state else 0)
    few = WorkerSettings(model="model", runner="simulated", simulated_state=True, num_saved_states=3)
    assert load_worker(few).runner.limits.num_saved_states == 3
    with pytest.raises(PenstockError, match="num_saved_states is 3, but no layer"):
        load_worker(WorkerSettings(model="model", runner="simulated", num_saved_states=3))


@pytest.mark.parametrize("slot", [0, 1])
def test_a_sequence_goes_on_from_the_state_of_a_slot(slot: int) -> None:
    runner = make_runner()
    begin(runner)
    assert go_on(runner, slot=slot) == expect(2)[1:]


def test_a_sequence_goes_on_from_a_state_that_was_saved() -> None:
    saved = LIMITS.max_num_seqs
    for source, is_right in ((saved, True), (saved + 1, False)):
        runner = make_runner()
        entering = admission(block_ids=u32(0, 1, 2, 3))
        given = {"slots": u32(0), "num_tokens": u32(10), "save_slots": u32(0), "save_states": u32(saved)}
        runner.launch(StepPlan(1, admissions=(entering,), **given))
        again = admission(tokens=PROMPT[::-1], block_ids=u32(4, 5, 6))
        runner.launch(StepPlan(2, u32(0), (again,), slots=u32(0), num_tokens=u32(10)))
        tokens = [*PROMPT, *expect(1)]
        third = admission(slot=1, tokens=tokens, computed=10, block_ids=u32(0, 1, 2, 3), source_state=source)
        plan = StepPlan(3, admissions=(third,), slots=u32(1), num_tokens=u32(1))
        assert (runner.launch(plan).result().token_ids.tolist() == expect(2)[1:]) is is_right


def test_a_state_is_saved_where_there_is_one() -> None:
    given = {"slots": u32(0), "num_tokens": u32(10), "save_slots": u32(0), "save_states": u32(0)}
    with pytest.raises(PenstockError, match="state is to be saved as 0"):
        make_runner().launch(StepPlan(1, admissions=(admission(block_ids=u32(0, 1, 2, 3)),), **given))


def test_a_state_of_other_tokens_gives_other_tokens() -> None:
    runner = make_runner()
    begin(runner)
    assert go_on(runner, source_state=2) != expect(2)[1:]


def test_states_change_places_at_once() -> None:
    runner = make_runner()
    prompts = PROMPT, PROMPT[::-1]
    entering = [admission(slot, prompts[slot], first_block=4 * slot) for slot in (0, 1)]
    plan = StepPlan(1, admissions=tuple(entering), slots=u32(0, 1), num_tokens=u32(10, 10))
    runner.launch(plan)
    crossed = [
        admission(
            1 - slot,
            [*prompts[slot], *expect(1, prompts[slot])],
            10,
            block_ids=np.arange(4 * slot, 4 * slot + 3, dtype=np.uint32),
            source_state=slot,
        )
        for slot in (0, 1)
    ]
    plan = StepPlan(2, u32(0, 1), tuple(crossed), slots=u32(0, 1), num_tokens=u32(1, 1))
    wanted = [expect(2, prompts[1])[1], expect(2, prompts[0])[1]]
    assert runner.launch(plan).result().token_ids.tolist() == wanted


@pytest.mark.parametrize("changes", [{"source_state": None}, {"computed": 0}, {"source_state": 99}])
def test_computed_tokens_and_states_come_together(changes: dict[str, object]) -> None:
    runner = make_runner()
    begin(runner)
    with pytest.raises(PenstockError, match="state"):
        go_on(runner, **changes)


def test_without_states_none_is_given() -> None:
    clock = Clock()
    runner = SimulatedRunner(LIMITS, SimulatedConfig(0.0), clock.read, clock.sleep)
    begin(runner)
    with pytest.raises(PenstockError, match="state"):
        go_on(runner)


def test_steps_that_give_no_token_are_refused() -> None:
    with pytest.raises(ValueError, match="no token"):
        make_runner(min_tokens_per_step=0)
