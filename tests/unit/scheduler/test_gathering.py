"""A plan waits for requests that are on their way, and not for long."""

import numpy as np
import pytest

from contract.domain.plan import StepPlan
from scheduler_svc.core.limits import WorkerLimits
from scheduler_svc.core.worker import WorkerState
from scheduler_svc.gathering import IDLE_NS, NS_PER_TOKEN, PAUSE_NS, Gathering

BUDGET = 64
NOW_NS = 10**12


@pytest.fixture
def worker() -> WorkerState:
    return WorkerState("w", WorkerLimits(num_blocks=8, block_size=4, max_num_seqs=4, max_model_len=64), BUDGET)


def test_an_idle_device_waits_for_what_is_coming_and_has_room(worker: WorkerState) -> None:
    gathering = Gathering()
    gathering.note(8, 3, NOW_NS)
    assert gathering.waits(worker, NOW_NS)
    gathering.note(BUDGET - 9, 2, NOW_NS)
    assert gathering.waits(worker, NOW_NS)
    gathering.note(1, 1, NOW_NS)
    assert not gathering.waits(worker, NOW_NS), "the plan is full"


def test_nobody_waits_for_what_is_not_known_to_come(worker: WorkerState) -> None:
    gathering = Gathering()
    assert not gathering.waits(worker, NOW_NS)
    gathering.note(8, 0, NOW_NS)
    assert not gathering.waits(worker, NOW_NS)


def test_an_idle_device_does_not_wait_for_long_however_much_comes(worker: WorkerState) -> None:
    gathering = Gathering()
    for since_ns in range(0, IDLE_NS, PAUSE_NS // 2):
        gathering.note(1, 9, NOW_NS + since_ns)
        assert gathering.waits(worker, NOW_NS + since_ns)
    gathering.note(1, 9, NOW_NS + IDLE_NS)
    assert not gathering.waits(worker, NOW_NS + IDLE_NS)
    gathering.has_planned("w")
    gathering.note(1, 9, NOW_NS + IDLE_NS)
    assert gathering.waits(worker, NOW_NS + IDLE_NS), "for the next plan it may"


def test_what_does_not_come_is_given_up(worker: WorkerState) -> None:
    gathering = Gathering()
    gathering.note(8, 1, NOW_NS)
    assert gathering.waits(worker, NOW_NS + PAUSE_NS - 1)
    assert not gathering.waits(worker, NOW_NS + PAUSE_NS)


def test_a_device_that_computes_has_time_by_its_tokens(worker: WorkerState) -> None:
    gathering = Gathering()
    _put_in_flight(worker, 40)
    worker.num_plain_plans = 1
    gathering.note(8, 1, NOW_NS)
    assert gathering.waits(worker, NOW_NS)
    assert gathering.waits(worker, NOW_NS + 40 * NS_PER_TOKEN - 1)
    assert not gathering.waits(worker, NOW_NS + 40 * NS_PER_TOKEN)


def test_while_prompts_are_computed_no_step_of_decodes_comes_before_more_prompts(worker: WorkerState) -> None:
    gathering = Gathering()
    _put_in_flight(worker, 1)
    gathering.note(1, 1, NOW_NS)
    gathering.has_planned("w")
    assert gathering.waits(worker, NOW_NS + 1)
    assert gathering.waits(worker, NOW_NS + PAUSE_NS - 1)
    assert not gathering.waits(worker, NOW_NS + PAUSE_NS)


def _put_in_flight(worker: WorkerState, num_tokens: int) -> None:
    plan = StepPlan(1, num_tokens=np.array([num_tokens], np.uint32))
    worker.issue(plan, np.empty(0, np.int64), NOW_NS)
