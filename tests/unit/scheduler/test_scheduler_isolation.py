"""Requests that were there when workers died run alone; one that goes on killing them ends with an error."""

from hypothesis import given, settings
from hypothesis import strategies as st
from scheduling import Scheduling, make_request, request_id

from contract.domain.errors import ErrorCode
from contract.domain.finish import CancelReason, FinishReason
from scheduler_svc.core.isolation import Tolerance
from scheduler_svc.core.limits import WorkerLimits


def limits(max_num_seqs: int = 8, max_model_len: int = 128) -> WorkerLimits:
    return WorkerLimits(num_blocks=64, block_size=4, max_num_seqs=max_num_seqs, max_model_len=max_model_len)


def prompt(number: int) -> list[int]:
    return [(number + position) % 11 for position in range(6)]


def running(scheduling: Scheduling, worker_id: str = "a") -> set[int]:
    """The numbers of the requests in the worker's slots."""
    sequences = scheduling.scheduler.workers[worker_id].running()
    return {int.from_bytes(sequence.request.request_id, "big") for sequence in sequences}


def die(scheduling: Scheduling, worker_id: str = "a") -> list[int]:
    """The worker dies and comes back."""
    struck = scheduling.lose_worker(worker_id)
    scheduling.add_worker(worker_id)
    return struck


def suspects(count: int, workers: tuple[str, ...] = ("a",), **fields: int) -> Scheduling:
    """So many requests that were on `a` when it died twice."""
    scheduling = Scheduling({worker_id: limits() for worker_id in workers}, plans_in_flight=2)
    for number in range(1, count + 1):
        scheduling.add(make_request(number, prompt(number), max_tokens=8, **fields))
    for _ in range(2):
        scheduling.schedule("a")
        die(scheduling)
    return scheduling


def test_what_a_worker_computed_when_it_died_gets_a_strike() -> None:
    scheduling = Scheduling({"a": limits(max_num_seqs=2)})
    for number in range(1, 4):
        scheduling.add(make_request(number, prompt(number), max_tokens=8))
    scheduling.schedule()
    assert die(scheduling) == [1, 2]
    assert scheduling.scheduler.requests[request_id(1)].num_strikes == 1
    assert scheduling.scheduler.requests[request_id(3)].num_strikes == 0


def test_a_worker_that_computed_nothing_strikes_nobody() -> None:
    scheduling = Scheduling({"a": limits()})
    scheduling.add(make_request(1, prompt(1), max_tokens=8))
    scheduling.schedule()
    scheduling.complete()
    assert die(scheduling) == []


def test_one_death_isolates_nobody() -> None:
    scheduling = Scheduling({"a": limits()})
    for number in (1, 2):
        scheduling.add(make_request(number, prompt(number), max_tokens=8))
    scheduling.schedule()
    die(scheduling)
    scheduling.schedule()
    assert running(scheduling) == {1, 2}


def test_suspects_run_one_after_the_other_and_finish() -> None:
    scheduling = suspects(3)
    seen = []
    while scheduling.scheduler.requests:
        scheduling.step()
        now = running(scheduling)
        assert len(now) <= 1
        seen += [number for number in now if number not in seen]
    assert seen == [1, 2, 3]
    scheduling.assert_nothing_is_left()


def test_the_others_finish_and_the_one_at_fault_ends_with_an_error_that_says_so() -> None:
    scheduling = Scheduling({"a": limits(), "b": limits()}, plans_in_flight=2)
    numbers, poison, num_deaths = range(1, 8), 4, 0
    for number in numbers:
        scheduling.add(make_request(number, prompt(number), n=1 + number % 2, max_tokens=12))
    for _ in range(1000):
        for worker_id in ("a", "b"):
            scheduling.step(worker_id)
            if poison in running(scheduling, worker_id) and len(scheduling.output(poison)) >= 3:
                num_deaths += 1
                die(scheduling, worker_id)
    scheduling.assert_nothing_is_left()
    assert num_deaths == 4
    for number in numbers:
        ends = {scheduling.finish(number, sequence) for sequence in range(1 + number % 2)}
        assert ends == {FinishReason.ERROR if number == poison else FinishReason.LENGTH}
    error = scheduling.written[request_id(poison), 0].error
    assert error is not None
    assert error.code is ErrorCode.INTERNAL
    assert "4 workers died while they computed this request, the last 2 while it ran alone" in error.message


def test_a_suspect_waits_until_its_worker_is_empty_and_nobody_joins_it() -> None:
    scheduling = Scheduling({"a": limits()}, plans_in_flight=1)
    scheduling.add(make_request(2, prompt(2), max_tokens=8))
    scheduling.step()
    scheduling.add(make_request(1, prompt(1), max_tokens=8, num_strikes=2))
    scheduling.add(make_request(3, prompt(3), max_tokens=8))
    seen = []
    while scheduling.scheduler.requests:
        scheduling.step()
        seen += [now for now in [running(scheduling)] if now and now not in seen[-1:]]
    assert seen == [{2}, {1}, {3}]
    scheduling.assert_nothing_is_left()


def test_a_suspect_does_not_overtake_what_the_policy_serves_first() -> None:
    scheduling = Scheduling({"a": limits(max_num_seqs=1)}, plans_in_flight=1, scheduling_policy="priority")
    scheduling.add(make_request(1, prompt(1), max_tokens=8, num_strikes=2, priority=5))
    scheduling.add(make_request(2, prompt(2), max_tokens=8, priority=1))
    scheduling.schedule()
    assert running(scheduling) == {2}
    scheduling.run()
    scheduling.assert_nothing_is_left()


def test_one_of_two_workers_stays_for_the_others() -> None:
    scheduling = suspects(3, ("a", "b"))
    for number in range(7, 10):
        scheduling.add(make_request(number, prompt(number), max_tokens=8))
    for worker_id in ("a", "b"):
        scheduling.schedule(worker_id)
    assert running(scheduling, "a") == {1}
    assert running(scheduling, "b") == {7, 8, 9}
    scheduling.run()
    scheduling.assert_nothing_is_left()


def test_samples_of_a_suspect_run_together_wherever_they_were() -> None:
    scheduling = Scheduling({"a": limits(max_num_seqs=1), "b": limits()}, plans_in_flight=1)
    scheduling.add(make_request(1, prompt(1), n=3, max_tokens=20))
    scheduling.step("a")
    for _ in range(10):  # until `a` is waited for no more
        scheduling.step("b")
    assert running(scheduling, "a") == running(scheduling, "b") == {1}
    scheduling.add(make_request(2, prompt(2), max_tokens=20))
    scheduling.schedule("b")
    assert running(scheduling, "b") == {1, 2}
    for _ in range(2):
        while not scheduling.in_flight["a"]:  # it waits a little for `b`, which has its prompt
            scheduling.schedule("a")
        die(scheduling, "a")
    assert running(scheduling, "b") == {2}
    scheduling.run()
    scheduling.assert_nothing_is_left()


def test_a_request_that_is_taken_over_keeps_its_strikes() -> None:
    scheduling = Scheduling({"a": limits()})
    scheduling.add(make_request(1, prompt(1), max_tokens=8, num_strikes=3))
    scheduling.add(make_request(2, prompt(2), n=2, max_tokens=8, num_strikes=4))
    assert {scheduling.finish(2, sequence) for sequence in range(2)} == {FinishReason.ERROR}
    scheduling.schedule()
    die(scheduling)
    assert scheduling.finish(1) is FinishReason.ERROR
    scheduling.assert_nothing_is_left()


def test_how_much_is_tolerated_can_be_told() -> None:
    scheduling = Scheduling({"a": limits()}, tolerance=Tolerance(num_strikes=1, num_strikes_alone=1))
    for number in (1, 2):
        scheduling.add(make_request(number, prompt(number), max_tokens=8))
    scheduling.schedule()
    die(scheduling)
    scheduling.schedule()
    assert running(scheduling) == {1}
    die(scheduling)
    assert scheduling.finish(1) is FinishReason.ERROR
    scheduling.run()
    scheduling.assert_nothing_is_left()


def test_a_cancelled_suspect_gives_its_worker_back() -> None:
    scheduling = suspects(1)
    scheduling.add(make_request(2, prompt(2), max_tokens=8))
    scheduling.schedule()
    assert running(scheduling) == {1}
    scheduling.cancel(1)
    scheduling.schedule()
    assert running(scheduling) == {2}
    scheduling.run()
    scheduling.assert_nothing_is_left()


# --- what is forgiven -------------------------------------------------------------------------------------------------

TOLERANCE = Tolerance(num_tokens=5)


def generate(scheduling: Scheduling, num_tokens: int, number: int = 1) -> None:
    """Until a request has so many tokens more, and computes the next."""
    enough = len(scheduling.output(number)) + num_tokens
    while len(scheduling.output(number)) < enough:
        scheduling.step()
    scheduling.schedule()


def test_deaths_for_other_reasons_do_not_add_up_in_a_long_life() -> None:
    scheduling = Scheduling({"a": limits(max_model_len=256)}, tolerance=TOLERANCE)
    scheduling.add(make_request(1, prompt(1), max_tokens=200))
    for _ in range(30):
        generate(scheduling, 5)
        assert die(scheduling) == [1]
        assert scheduling.scheduler.requests[request_id(1)].num_strikes == 1
    scheduling.run()
    scheduling.assert_nothing_is_left()


@settings(max_examples=30)
@given(gaps=st.lists(st.integers(0, 9), max_size=9), n=st.integers(1, 2))
def test_only_strikes_that_follow_closely_on_each_other_count(gaps: list[int], n: int) -> None:
    scheduling = Scheduling({"a": limits(max_model_len=256)}, tolerance=TOLERANCE)
    scheduling.add(make_request(1, prompt(1), n=n, max_tokens=90))
    strikes = struck_at = 0
    for gap in gaps:
        generate(scheduling, gap)
        die(scheduling)
        num_tokens = sum(len(scheduling.output(1, sequence)) for sequence in range(n))
        strikes, struck_at = 1 if num_tokens - struck_at >= 5 * n else strikes + 1, num_tokens
        if strikes == 4:
            break
        request = scheduling.scheduler.requests[request_id(1)]
        assert (request.num_strikes, request.struck_at) == (strikes, struck_at)
        assert TOLERANCE.is_suspect(request) == (strikes >= 2)
    scheduling.run()
    assert scheduling.finish(1) is (FinishReason.ERROR if strikes == 4 else FinishReason.LENGTH)
    scheduling.assert_nothing_is_left()


def test_who_is_at_fault_is_found_however_long_it_went_on_well() -> None:
    scheduling = Scheduling({"a": limits(max_model_len=256)}, tolerance=TOLERANCE)
    scheduling.add(make_request(1, prompt(1), max_tokens=200))
    generate(scheduling, 100)
    for num_deaths in range(1, 5):
        assert scheduling.finish(1) is FinishReason.UNSPECIFIED
        assert die(scheduling) == [1], num_deaths
        scheduling.schedule()
    assert scheduling.finish(1) is FinishReason.ERROR
    scheduling.assert_nothing_is_left()


def test_a_suspect_that_goes_on_well_runs_among_others_again() -> None:
    scheduling = Scheduling({"a": limits()}, tolerance=TOLERANCE)
    scheduling.add(make_request(1, prompt(1), n=2, max_tokens=60, num_strikes=2))
    scheduling.add(make_request(2, prompt(2), max_tokens=60))
    scheduling.schedule()
    assert running(scheduling) == {1}
    while running(scheduling) == {1}:
        scheduling.step()
    assert running(scheduling) == {1, 2}
    assert 10 <= sum(len(scheduling.output(1, sequence)) for sequence in range(2)) <= 14
    assert die(scheduling) == [1, 2]
    scheduling.schedule()
    assert running(scheduling) == {1, 2}
    scheduling.run()
    scheduling.assert_nothing_is_left()


def test_what_waits_beside_a_forgiven_suspect_belongs_to_all_again() -> None:
    """A worker with a slot for one of two samples: the other waited for that worker alone."""
    scheduling = Scheduling({"a": limits(max_num_seqs=1), "b": limits()}, tolerance=TOLERANCE)
    scheduling.add(make_request(1, prompt(1), n=2, max_tokens=60, num_strikes=2))
    while not running(scheduling, "b"):
        scheduling.step("a")
        scheduling.schedule("b")
    assert running(scheduling, "a") == running(scheduling, "b") == {1}
    scheduling.run()
    scheduling.assert_nothing_is_left()


def test_a_sample_that_ended_need_not_make_progress_any_more() -> None:
    scheduling = Scheduling({"a": limits()}, tolerance=TOLERANCE)
    scheduling.add(make_request(1, prompt(1), n=2, max_tokens=60, num_strikes=2))
    scheduling.add(make_request(2, prompt(2), max_tokens=60))
    scheduling.step()
    scheduling.cancel(1, CancelReason.STOP, sequence=1)
    while running(scheduling) == {1}:
        scheduling.step()
    assert 5 <= sum(len(scheduling.output(1, sequence)) for sequence in range(2)) < 10
    scheduling.run()
    scheduling.assert_nothing_is_left()
