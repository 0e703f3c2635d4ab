"""Cancels, deadlines, preemption, lost workers and results that were never asked for."""

import numpy as np
import pytest
from scheduling import Scheduling, make_request, request_id

from contract.domain.errors import ErrorCode
from contract.domain.finish import CancelReason, FinishReason
from contract.domain.plan import Logprobs, StepResult
from scheduler_svc.core.early_cancels import MAX_REQUESTS
from scheduler_svc.core.limits import WorkerLimits
from scheduler_svc.core.planned_steps import StepError
from scheduler_svc.core.rows import token_rows

SECOND = 10**9


def limits(num_blocks: int = 64, block_size: int = 4, max_num_seqs: int = 8, max_model_len: int = 128) -> WorkerLimits:
    return WorkerLimits(num_blocks, block_size, max_num_seqs, max_model_len)


def prompt(length: int, start: int = 0) -> list[int]:
    return [(start + position) % 11 for position in range(length)]


def running(scheduling: Scheduling) -> set[int]:
    infos = scheduling.scheduler.list_requests()
    return {
        int.from_bytes(info.request_id, "big")
        for info in infos
        if any(sequence.status == "running" for sequence in info.sequences)
    }


@pytest.mark.parametrize(
    ("reason", "finish", "code"),
    [
        (CancelReason.CLIENT, FinishReason.CANCELLED, None),
        (CancelReason.DEADLINE, FinishReason.ERROR, ErrorCode.DEADLINE_EXCEEDED),
        (CancelReason.SHUTDOWN, FinishReason.ERROR, ErrorCode.UNAVAILABLE),
    ],
)
def test_a_cancel_ends_all_sequences_behind_their_tokens(
    reason: CancelReason, finish: FinishReason, code: ErrorCode | None
) -> None:
    scheduling = Scheduling({"a": limits(max_num_seqs=2)}, plans_in_flight=1)
    scheduling.add(make_request(1, prompt(5), n=3, max_tokens=50))
    for _ in range(4):
        scheduling.step()
    scheduling.cancel(1, reason)
    assert [scheduling.finish(1, sequence) for sequence in range(3)] == [finish] * 3
    errors = [scheduling.written[request_id(1), sequence].error for sequence in range(3)]
    assert [error.code if error else None for error in errors] == [code] * 3
    assert scheduling.scheduler.stats().workers["a"].num_used_blocks == 0


def test_a_sequence_that_a_stop_string_ended_leaves_without_a_row() -> None:
    scheduling = Scheduling({"a": limits()}, plans_in_flight=2)
    scheduling.add(make_request(1, prompt(5), n=2, max_tokens=8))
    for _ in range(3):
        scheduling.step()
    scheduling.cancel(1, CancelReason.STOP, 1)
    assert scheduling.finish(1, 1) == FinishReason.UNSPECIFIED
    num_tokens = len(scheduling.output(1, 1))
    scheduling.run()
    assert len(scheduling.output(1, 1)) == num_tokens
    assert len(scheduling.output(1, 0)) == 8
    scheduling.assert_nothing_is_left()


@pytest.mark.parametrize("window", [1, 2, 4])
def test_blocks_of_a_cancelled_request_serve_others_in_the_next_plan(window: int) -> None:
    scheduling = Scheduling({"a": limits(num_blocks=4)}, plans_in_flight=window)
    scheduling.add(make_request(1, prompt(9), max_tokens=7))
    scheduling.add(make_request(2, prompt(9, 3), max_tokens=7))
    for _ in range(window):
        scheduling.schedule()
    scheduling.cancel(1)
    scheduling.complete()
    plan = scheduling.schedule()
    assert plan is not None
    assert len(plan.admissions) == 1
    scheduling.run()
    scheduling.assert_nothing_is_left()


def test_a_cancel_that_comes_before_its_request_counts() -> None:
    scheduling = Scheduling({"a": limits()})
    scheduling.cancel(1)
    scheduling.cancel(2, CancelReason.STOP, 1)
    scheduling.add(make_request(1, prompt(5), max_tokens=5))
    scheduling.add(make_request(2, prompt(5), n=2, max_tokens=5))
    assert scheduling.finish(1) == FinishReason.CANCELLED
    scheduling.run()
    assert (len(scheduling.output(2, 0)), len(scheduling.output(2, 1))) == (5, 0)
    scheduling.assert_nothing_is_left()


@pytest.mark.parametrize(("age_s", "counts"), [(1, True), (59, True), (61, False)])
def test_an_early_cancel_counts_for_a_minute(age_s: int, counts: bool) -> None:
    scheduling = Scheduling({"a": limits()})
    scheduling.expire(100 * SECOND)
    scheduling.cancel(1)
    scheduling.expire((100 + age_s) * SECOND)
    scheduling.add(make_request(1, prompt(5), max_tokens=2))
    assert (scheduling.finish(1) == FinishReason.CANCELLED) is counts


def test_early_cancels_are_bounded_in_number() -> None:
    scheduling = Scheduling({"a": limits()})
    for number in range(MAX_REQUESTS + 1):
        scheduling.cancel(number)
    for number in (0, 1, MAX_REQUESTS):
        scheduling.add(make_request(number, prompt(5), max_tokens=2))
    assert scheduling.finish(0) == FinishReason.UNSPECIFIED
    assert scheduling.finish(1) == scheduling.finish(MAX_REQUESTS) == FinishReason.CANCELLED


def test_a_deadline_ends_waiting_and_running_requests() -> None:
    scheduling = Scheduling({"a": limits(max_num_seqs=1)})
    scheduling.add(make_request(1, prompt(5), max_tokens=50, deadline_ns=10))
    scheduling.add(make_request(2, prompt(5), max_tokens=50, deadline_ns=20))
    scheduling.add(make_request(3, prompt(5), max_tokens=3))
    scheduling.step()
    scheduling.expire(9)
    assert scheduling.finish(1) == FinishReason.UNSPECIFIED
    scheduling.expire(20)
    assert scheduling.finish(1) == scheduling.finish(2) == FinishReason.ERROR
    error = scheduling.written[request_id(2), 0].error
    assert error is not None
    assert error.code == ErrorCode.DEADLINE_EXCEEDED
    scheduling.run()
    scheduling.assert_nothing_is_left()


def test_a_deadline_that_has_passed_ends_a_request_when_it_comes() -> None:
    scheduling = Scheduling({"a": limits()})
    scheduling.expire(100)
    scheduling.add(make_request(1, prompt(5), n=2, deadline_ns=100))
    assert scheduling.finish(1) == scheduling.finish(1, 1) == FinishReason.ERROR
    scheduling.assert_nothing_is_left()


def test_the_newest_is_preempted_and_comes_back_before_those_that_wait() -> None:
    scheduling = Scheduling({"a": limits(num_blocks=6, max_num_seqs=3)}, plans_in_flight=1)
    for number in (1, 2, 3):
        scheduling.add(make_request(number, prompt(7, number), max_tokens=10))
    scheduling.add(make_request(4, prompt(7, 4), max_tokens=10))
    scheduling.step()
    assert running(scheduling) == {1, 2, 3}
    while not scheduling.scheduler.stats().counters.num_preemptions:
        scheduling.step()
    assert running(scheduling) == {1, 2}
    order = [*scheduling.written]
    finished: list[int] = []
    while scheduling.scheduler.requests:
        scheduling.step()
        for identifier, _ in order:
            number = int.from_bytes(identifier, "big")
            if scheduling.finish(number) and number not in finished:
                finished.append(number)
    assert finished == [1, 2, 3, 4]
    scheduling.assert_nothing_is_left()


def test_the_least_important_is_preempted_first_and_the_most_important_admitted_first() -> None:
    scheduling = Scheduling(
        {"a": limits(num_blocks=6, max_num_seqs=2)}, plans_in_flight=2, scheduling_policy="priority"
    )
    scheduling.add(make_request(1, prompt(7, 1), max_tokens=16, priority=2))
    scheduling.add(make_request(2, prompt(7, 2), max_tokens=16, priority=1))
    scheduling.add(make_request(3, prompt(7, 3), max_tokens=3, priority=0))
    scheduling.step()
    assert running(scheduling) == {2, 3}
    while not scheduling.scheduler.stats().counters.num_preemptions:
        scheduling.step()
        assert 2 in running(scheduling)
    assert running(scheduling) == {2}
    scheduling.run()
    scheduling.assert_nothing_is_left()


def test_first_come_first_served_does_not_overtake_a_long_prompt() -> None:
    scheduling = Scheduling({"a": limits(num_blocks=8)}, plans_in_flight=1)
    scheduling.add(make_request(1, prompt(16), max_tokens=8))
    scheduling.step()
    scheduling.add(make_request(2, prompt(24, 5), max_tokens=4))
    scheduling.add(make_request(3, prompt(2), max_tokens=4))
    scheduling.step()
    assert running(scheduling) == {1}
    scheduling.run()
    scheduling.assert_nothing_is_left()


@pytest.mark.parametrize("window", [1, 2, 4])
def test_many_sequences_with_room_for_one_all_end(window: int) -> None:
    scheduling = Scheduling({"a": limits(num_blocks=5)}, plans_in_flight=window)
    for number in range(1, 7):
        scheduling.add(make_request(number, prompt(3, number), n=2, max_tokens=17))
    scheduling.run()
    assert scheduling.scheduler.stats().counters.num_preemptions > 0
    scheduling.assert_nothing_is_left()


def test_sequences_of_a_lost_worker_go_on_elsewhere() -> None:
    scheduling = Scheduling({"a": limits(), "b": limits()}, plans_in_flight=2)
    for number in range(1, 5):
        scheduling.add(make_request(number, prompt(6, number), n=2, max_tokens=12))
    for _ in range(4):
        scheduling.step("a")
    assert len(running(scheduling)) == 4
    scheduling.remove_worker("a")
    assert running(scheduling) == set()
    for _ in range(100):
        scheduling.step("b")
    scheduling.assert_nothing_is_left()


def test_a_worker_that_comes_back_starts_from_step_one_and_empty_slots() -> None:
    scheduling = Scheduling({"a": limits()}, plans_in_flight=2)
    scheduling.add(make_request(1, prompt(6), max_tokens=12))
    scheduling.step()
    scheduling.remove_worker("a")
    scheduling.add_worker("a")
    plan = scheduling.schedule()
    assert plan is not None
    assert plan.step == 1
    assert plan.released_slots.tolist() == []
    scheduling.run()
    scheduling.assert_nothing_is_left()


def test_a_worker_is_added_once() -> None:
    scheduling = Scheduling({"a": limits()})
    with pytest.raises(ValueError, match="remove it first"):
        scheduling.scheduler.add_worker("a", limits())


def test_a_result_that_comes_twice_is_applied_once() -> None:
    scheduling = Scheduling({"a": limits()}, plans_in_flight=1)
    scheduling.add(make_request(1, prompt(3), max_tokens=12))
    scheduling.schedule()
    scheduling.complete()
    scheduling.redeliver("a")
    scheduling.schedule()
    scheduling.redeliver("a")
    scheduling.run()
    scheduling.assert_nothing_is_left()


def result(step: int, slots: list[int], counts: list[int], tokens: list[int]) -> StepResult:
    columns = (np.array(column, np.uint32) for column in (slots, counts, tokens))
    return StepResult(step, *columns)


@pytest.mark.parametrize(
    "bad",
    [
        result(3, [0, 1], [1, 1], [5, 5]),  # never planned
        result(2, [0, 1], [1, 1], [5, 5]),  # step 1 is missing
        result(0, [0, 1], [1, 1], [5, 5]),
        result(1, [0, 2], [1, 1], [5, 5]),  # a slot that did not compute
        result(1, [0, 99], [1, 1], [5, 5]),
        result(1, [0, 0], [1, 1], [5, 5]),
        result(1, [0, 1], [2, 1], [5, 5, 5]),  # more than planned
        result(1, [0, 1], [1, 1], [5]),
        result(1, [0, 1], [1], [5]),
    ],
)
def test_a_result_that_contradicts_the_plans_is_refused_and_changes_nothing(bad: StepResult) -> None:
    scheduling = Scheduling({"a": limits()}, plans_in_flight=2)
    scheduling.add(make_request(1, prompt(3), max_tokens=12))
    scheduling.add(make_request(2, prompt(3), max_tokens=12))
    scheduling.schedule()
    scheduling.schedule()
    with pytest.raises(StepError, match="worker a"):
        scheduling.scheduler.apply("a", bad, 0)
    scheduling.run()
    scheduling.assert_nothing_is_left()


def test_a_step_may_give_one_slot_several_tokens_and_another_none() -> None:
    """Rows are cut behind the token that ends their sequence, with their logprobs."""
    scheduling = Scheduling({"a": limits()}, plans_in_flight=1)
    scheduler = scheduling.scheduler
    for number in (1, 2, 3):
        scheduler.add(make_request(number, prompt(3), max_tokens=3, stop_token_ids=(9,)), 0)
    scheduler.schedule("a", 0)
    tokens = np.array([4, 9, 5, 6, 7, 8], np.uint32)
    ones, floats = np.ones(6, np.uint32), tokens.astype(np.float32)
    logprobs = Logprobs(-floats, tokens + ones, ones, tokens + 10, floats)
    columns = (np.array([0, 1, 2], np.uint32), np.array([3, 0, 3], np.uint32), tokens)
    rows, slots = token_rows(scheduler.workers["a"], StepResult(1, *columns, logprobs), np.ones(3, np.bool_))
    assert slots.tolist() == [0, 2]
    assert rows.counts.tolist() == [2, 3]
    assert rows.token_ids.tolist() == [4, 9, 6, 7, 8]
    assert rows.finishes.tolist() == [FinishReason.STOP, FinishReason.LENGTH]
    assert rows.logprobs is not None
    assert rows.logprobs.top_ids.tolist() == [14, 19, 16, 17, 18]
    assert rows.logprobs.ranks.tolist() == [5, 10, 7, 8, 9]
