"""When a scheduler asks for requests: when it is told of one, and before a plan that is about to be made."""

import time

import pytest
from memory_bus import MemoryBus
from scheduler_pool import Client, Worker, prompt, scheduler, until

from scheduler_svc.core.limits import WorkerLimits
from scheduler_svc.core.pacing import Pacing
from scheduler_svc.dispatch import Dispatcher
from scheduler_svc.looks import Looks
from scheduler_svc.metrics import Meters
from scheduler_svc.settings import SchedulerSettings
from servicekit.bus.calls import Claim, Owned

FAR_NS = 10**12  # more than any test takes


@pytest.fixture
def dispatcher() -> Dispatcher:
    """It has room, and was told of no request."""
    dispatcher = Dispatcher(SchedulerSettings(), MemoryBus().keys, b"s" * 16, Meters())
    dispatcher.pairings.is_worker_alive = False  # then nobody waits to be paired before requests are claimed
    return dispatcher


def num_claims(dispatcher: Dispatcher) -> int:
    return sum(isinstance(each.call, Claim) for each in dispatcher.outbox.pending)


def test_requests_are_asked_for_right_before_a_plan_is_made(dispatcher: Dispatcher) -> None:
    dispatcher.due_ns = time.monotonic_ns()
    dispatcher.look_before_plan(is_draining=False)
    assert num_claims(dispatcher) == 1


def test_requests_are_not_asked_for_while_no_plan_waits_or_one_waits_for_long(dispatcher: Dispatcher) -> None:
    dispatcher.look_before_plan(is_draining=False)
    dispatcher.due_ns = time.monotonic_ns() + FAR_NS
    dispatcher.look_before_plan(is_draining=False)
    assert num_claims(dispatcher) == 0


def test_requests_are_not_asked_for_twice_in_one_exchange(dispatcher: Dispatcher) -> None:
    dispatcher.look_around(is_draining=False)
    assert num_claims(dispatcher) == 1
    dispatcher.due_ns = time.monotonic_ns()
    dispatcher.look_before_plan(is_draining=False)
    assert num_claims(dispatcher) == 1


def test_who_has_no_room_asks_for_nothing(dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher.scheduler, "has_room", lambda: False)
    dispatcher.due_ns = time.monotonic_ns()
    dispatcher.look_before_plan(is_draining=False)
    assert num_claims(dispatcher) == 0


def test_what_a_lost_answer_may_have_brought_is_asked_for(dispatcher: Dispatcher) -> None:
    dispatcher.look_around(is_draining=False)
    dispatcher.outbox.pending.clear()
    dispatcher.due_ns = time.monotonic_ns()
    dispatcher.look_before_plan(is_draining=False)
    dispatcher.send_again()
    assert [type(each.call) for each in dispatcher.outbox.pending] == [Owned]
    dispatcher.look_around(is_draining=False)
    assert num_claims(dispatcher) == 1


def test_the_next_plan_tells_how_long_a_look_took_unless_its_answer_was_lost(
    dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    took_ns: list[int] = []
    monkeypatch.setattr(Looks, "observe", lambda _, each: took_ns.append(each))
    for is_lost in (False, True):
        dispatcher.due_ns = began_ns = time.monotonic_ns()
        dispatcher.look_before_plan(is_draining=False)
        if is_lost:
            dispatcher.send_again()
        dispatcher.plan()
        dispatcher.plan()
        assert len(took_ns) == 1
        if not is_lost:
            assert 0 < took_ns[0] <= time.monotonic_ns() - began_ns


def test_who_drains_asks_for_nothing(dispatcher: Dispatcher) -> None:
    dispatcher.due_ns = time.monotonic_ns()
    dispatcher.look_before_plan(is_draining=True)
    assert num_claims(dispatcher) == 0


def test_a_request_is_claimed_by_its_hint_which_says_how_long_it_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler_svc.claiming.SWEEP_NS", FAR_NS)
    bus = MemoryBus()
    client = Client(bus)
    with scheduler(bus) as service, Worker(bus):
        first = client.submit(1, prompt(1))
        client.wait((first, 0))
        second = client.submit(2, prompt(2))
        client.wait((second, 0))
        waits = service.meters.requests.wait
        assert sum(waits.counts) == 2
        assert waits.total > 0


def test_a_request_that_nobody_told_of_is_claimed_before_the_next_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    period_ns = 5_000_000

    def due_ns(_: Pacing, now_ns: int) -> int:
        since_ns = now_ns % period_ns
        return now_ns if since_ns < period_ns // 5 else now_ns - since_ns + period_ns

    def without_hints(dispatcher: Dispatcher) -> dict[bytes, bytes]:
        return {stream: after for stream, after in positions(dispatcher).items() if stream != bus.keys.requests}

    bus, positions = MemoryBus(), Dispatcher.positions
    monkeypatch.setattr(Pacing, "due_ns", due_ns)
    monkeypatch.setattr(Dispatcher, "positions", without_hints)
    monkeypatch.setattr("scheduler_svc.claiming.SWEEP_NS", FAR_NS)
    client = Client(bus)
    limits = WorkerLimits(num_blocks=256, block_size=4, max_num_seqs=4, max_model_len=1000)
    first = client.submit(1, prompt(1), max_tokens=900)

    def is_claimed() -> bool:
        client.read()
        assert (first, 0) not in client.finishes
        return second in client.opened

    with scheduler(bus) as service, Worker(bus, limits=limits) as worker:
        worker.is_held.set()
        until(lambda: service.stats().num_running_seqs == 1, "the first")
        second = client.submit(2, prompt(2))
        worker.is_held.clear()
        until(is_claimed, "the claim of the second")
