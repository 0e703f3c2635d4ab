"""When a scheduler asks for requests: when it is told of one, and before a plan that is about to be made."""

import time

import pytest
from memory_bus import MemoryBus
from scheduler_pool import Client, Worker, prompt, scheduler, until

from scheduler_svc.claiming import Claiming
from scheduler_svc.core.pacing import Pacing
from scheduler_svc.dispatch import LOOK_NS, Dispatcher
from scheduler_svc.metrics import Meters
from scheduler_svc.settings import SchedulerSettings
from servicekit.bus import keys
from servicekit.bus.calls import Claim, Entry

FAR_NS = 10**12  # more than any test takes


def hint(number: int) -> Entry:
    return Entry(b"%d-0" % number, {keys.REQUEST: b"request %d" % number, keys.SENT_NS: b"%d" % (number * 1000)})


def test_a_hint_asks_for_a_claim_unless_what_it_tells_of_was_claimed_with_it() -> None:
    claiming = Claiming()
    claiming.is_due = False
    for number in (1, 2):
        claiming.note(hint(number))
    assert claiming.take_hint(b"request 1", 7) == 1000
    claiming.hint(hint(1))
    assert not claiming.is_due
    claiming.hint(hint(2))
    assert claiming.is_due
    claiming.hint(hint(1))
    assert claiming.is_due, "another one is still to be had"


def test_without_a_hint_a_request_could_be_had_since_now() -> None:
    assert Claiming().take_hint(b"request 1", 7) == 7


@pytest.fixture
def dispatcher() -> Dispatcher:
    """It has room, and was told of no request."""
    dispatcher = Dispatcher(SchedulerSettings(), MemoryBus().keys, b"s" * 16, Meters())
    dispatcher.pairings.is_worker_alive = False  # then nobody waits to be paired before requests are claimed
    return dispatcher


def num_claims(dispatcher: Dispatcher) -> int:
    return sum(isinstance(each.call, Claim) for each in dispatcher.outbox.pending)


def test_requests_are_asked_for_right_before_a_plan_is_made(dispatcher: Dispatcher) -> None:
    dispatcher.due_ns = time.monotonic_ns() + LOOK_NS
    dispatcher.look_before_plan(is_draining=False)
    assert num_claims(dispatcher) == 1


def test_requests_are_not_asked_for_while_no_plan_waits_or_one_waits_for_long(dispatcher: Dispatcher) -> None:
    dispatcher.look_before_plan(is_draining=False)
    dispatcher.due_ns = time.monotonic_ns() + FAR_NS
    dispatcher.look_before_plan(is_draining=False)
    assert num_claims(dispatcher) == 0


def test_who_drains_asks_for_nothing(dispatcher: Dispatcher) -> None:
    dispatcher.due_ns = time.monotonic_ns()
    dispatcher.look_before_plan(is_draining=True)
    assert num_claims(dispatcher) == 0


def test_a_request_that_nobody_told_of_is_claimed_before_the_next_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    period_ns = 5_000_000

    def due_ns(_: Pacing, now_ns: int) -> int:
        since_ns = now_ns % period_ns
        return now_ns if since_ns < period_ns // 5 else now_ns - since_ns + period_ns

    monkeypatch.setattr(Pacing, "due_ns", due_ns)
    monkeypatch.setattr(Claiming, "hint", lambda *_: None)
    monkeypatch.setattr("scheduler_svc.claiming.SWEEP_NS", FAR_NS)
    bus = MemoryBus()
    client = Client(bus)
    first = client.submit(1, prompt(1), max_tokens=40)
    with scheduler(bus) as service, Worker(bus) as worker:
        worker.is_held.set()
        until(lambda: service.stats().num_running_seqs == 1, "the first")
        second = client.submit(2, prompt(2))
        worker.is_held.clear()
        client.wait((first, 0))
        assert second in client.opened
