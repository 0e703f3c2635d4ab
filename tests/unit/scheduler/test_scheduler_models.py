"""A request goes on with the model that it began on, and with no other."""

import pytest
from scheduling import Scheduling, make_request, request_id

from contract.domain.errors import ErrorCode
from contract.domain.finish import CancelReason, FinishReason
from scheduler_svc.core.limits import WorkerLimits
from scheduler_svc.core.models import Absences

OLD, NEW = b"old-----", b"new-----"


def upgrade(policy: str = "fcfs", *, max_num_seqs: int = 4) -> Scheduling:
    """A scheduler with one worker of the old model; `b` is to have the new one."""
    limits = WorkerLimits(400, 4, max_num_seqs, 64)
    scheduling = Scheduling({"a": limits, "b": limits}, plans_in_flight=1, scheduling_policy=policy)
    for worker_id in ("a", "b"):
        scheduling.remove_worker(worker_id)
    scheduling.add_worker("a", OLD)
    return scheduling


def add(scheduling: Scheduling, *numbers: int, **fields: object) -> None:
    for number in numbers:
        scheduling.add(make_request(number, [1 + number % 3, 2, 3, 4, 5], **{"max_tokens": 8, **fields}))


def running(scheduling: Scheduling, worker_id: str) -> set[int]:
    sequences = scheduling.scheduler.workers[worker_id].running()
    return {int.from_bytes(sequence.request.request_id, "big") for sequence in sequences}


def begin(scheduling: Scheduling, *numbers: int, **fields: object) -> None:
    """These have their first token of `a`."""
    add(scheduling, *numbers, **fields)
    scheduling.step("a")
    assert all(scheduling.output(number) for number in numbers)


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_what_began_on_a_model_waits_for_a_worker_of_it_while_others_are_served(policy: str) -> None:
    scheduling = upgrade(policy)
    begin(scheduling, 1, 2)
    scheduling.remove_worker("a")
    scheduling.add_worker("b", NEW)
    add(scheduling, 3)
    scheduling.step("b")
    assert running(scheduling, "b") == {3}
    assert scheduling.scheduler.models == {OLD: 2, NEW: 1}
    scheduling.add_worker("a", OLD)
    scheduling.run()
    scheduling.assert_nothing_is_left()
    assert [scheduling.written[request_id(number), 0].model_digest for number in (1, 2, 3)] == [OLD, OLD, NEW]


def test_many_that_wait_for_one_model_do_not_stand_in_the_way_of_another() -> None:
    scheduling = upgrade(max_num_seqs=40)
    begin(scheduling, *range(1, 41))
    scheduling.remove_worker("a")
    scheduling.add_worker("b", NEW)
    add(scheduling, 50)
    scheduling.step("b")
    assert running(scheduling, "b") == {50}
    assert scheduling.scheduler.waiting.num_of_other_models == 40


def test_those_of_a_model_and_those_of_none_are_served_in_the_order_of_the_policy() -> None:
    scheduling = upgrade("priority", max_num_seqs=2)
    begin(scheduling, 1, 2, priority=1)
    scheduling.remove_worker("a")
    scheduling.add_worker("b", NEW)
    scheduling.step("b")  # leaves them to their model
    add(scheduling, 3, priority=0)
    add(scheduling, 4, priority=2)
    scheduling.remove_worker("b")
    scheduling.add_worker("a", OLD)
    scheduling.step("a")
    assert running(scheduling, "a") == {3, 1}


def test_a_request_without_a_token_may_begin_again_on_another_model() -> None:
    scheduling = upgrade()
    add(scheduling, 1, n=2)
    scheduling.schedule("a")
    assert scheduling.scheduler.models == {OLD: 1}
    scheduling.remove_worker("a")
    assert not scheduling.scheduler.models
    scheduling.add_worker("b", NEW)
    scheduling.run()
    scheduling.assert_nothing_is_left()
    assert {scheduling.written[request_id(1), index].model_digest for index in range(2)} == {NEW}


def test_all_samples_of_a_request_are_of_one_model() -> None:
    scheduling = upgrade(max_num_seqs=1)
    scheduling.add_worker("b", NEW)
    begin(scheduling, 1, n=3)
    for _ in range(20):
        scheduling.step("b")
    assert running(scheduling, "b") == set()
    scheduling.run()
    assert {scheduling.written[request_id(1), index].model_digest for index in range(3)} == {OLD}


def test_a_sample_that_waits_is_free_again_when_its_request_has_lost_all_that_it_had() -> None:
    scheduling = upgrade(max_num_seqs=1)
    add(scheduling, 1, n=2)
    scheduling.schedule("a")
    scheduling.add_worker("b", NEW)
    scheduling.step("b")  # meets the second sample, which is of the old model now
    scheduling.cancel(1, CancelReason.CLIENT, 0)
    scheduling.remove_worker("a")
    scheduling.run()
    assert scheduling.written[request_id(1), 1].model_digest == NEW
    assert scheduling.finish(1, 1) is FinishReason.LENGTH


def test_requests_of_a_model_that_is_gone_end_with_an_error_that_says_so() -> None:
    scheduling = upgrade()
    begin(scheduling, 1, 2)
    scheduling.remove_worker("a")
    scheduling.add_worker("b", NEW)
    add(scheduling, 3)
    scheduling.step("b")
    scheduling.abandon(OLD)
    for number in (1, 2):
        error = scheduling.written[request_id(number), 0].error
        assert error is not None
        assert error.code is ErrorCode.MODEL_REPLACED
        assert "600 s" in error.message
    assert scheduling.scheduler.models == {NEW: 1}
    scheduling.run()
    assert scheduling.finish(3) is FinishReason.LENGTH


def test_what_is_handed_over_is_another_schedulers_without_a_row() -> None:
    scheduling = upgrade()
    begin(scheduling, 1, 2)
    scheduling.remove_worker("a")
    scheduling.add_worker("b", NEW)
    ids = scheduling.scheduler.requests.of_model(OLD)
    assert ids == [request_id(1), request_id(2)]
    scheduling.scheduler.hand_over(ids)
    scheduling.scheduler.check_integrity()
    assert not scheduling.scheduler.requests
    assert not len(scheduling.scheduler.waiting)
    assert scheduling.finish(1) is FinishReason.UNSPECIFIED


def test_stranded_requests_do_not_keep_a_scheduler_from_claiming_more() -> None:
    scheduling = upgrade(max_num_seqs=8)
    scheduling.scheduler.config = type(scheduling.scheduler.config)(plans_in_flight=1, max_waiting_seqs=4)
    begin(scheduling, *range(1, 9))
    scheduling.remove_worker("a")
    assert not scheduling.scheduler.has_room()
    scheduling.add_worker("b", NEW)
    scheduling.step("b")
    assert scheduling.scheduler.has_room()


def test_what_no_worker_of_its_model_can_hold_ends_and_others_are_not_asked() -> None:
    scheduling = upgrade()
    begin(scheduling, 1)
    scheduling.remove_worker("a")
    scheduling.limits["b"] = WorkerLimits(1, 4, 4, 4)
    scheduling.add_worker("b", NEW)
    assert scheduling.finish(1) is FinishReason.UNSPECIFIED
    scheduling.limits["a"] = WorkerLimits(1, 4, 4, 4)
    scheduling.add_worker("a", OLD)
    assert scheduling.finish(1) is FinishReason.LENGTH


def test_a_suspect_of_one_model_runs_alone_there_and_does_not_hold_up_those_of_the_other() -> None:
    scheduling = upgrade()
    begin(scheduling, 1)
    for _ in range(2):
        scheduling.schedule("a")
        scheduling.lose_worker("a")
        scheduling.add_worker("a", OLD)
    scheduling.remove_worker("a")
    scheduling.add_worker("b", NEW)
    add(scheduling, 2)
    scheduling.step("b")
    assert running(scheduling, "b") == {2}
    scheduling.add_worker("a", OLD)
    scheduling.run()
    scheduling.assert_nothing_is_left()


def test_a_model_is_absent_only_while_another_is_there() -> None:
    absences = Absences(10)
    assert absences.note({OLD}, {OLD}, 0) == []
    assert absences.note({OLD}, {NEW}, 1) == []
    assert absences.note({OLD}, {NEW}, 10) == []
    assert absences.note({OLD}, {NEW}, 11) == [OLD]
    assert absences.note({OLD}, set(), 12) == [], "no worker at all: it waits"
    assert absences.note({OLD}, {NEW}, 13) == [], "and begins to wait anew"
    assert absences.note({OLD}, {NEW, OLD}, 20) == []
    assert absences.note({OLD}, {NEW}, 24) == []
    assert absences.note({NEW}, {NEW}, 99) == []
