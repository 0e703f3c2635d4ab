"""The service over the bus in memory, when workers, messages and the bus itself fail."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from memory_bus import MemoryBus
from prometheus_client.samples import Sample
from scheduler_pool import Client, LossyBus, Worker, expected, prompt, scheduler, session_of, until

from contract.domain.errors import ErrorCode
from contract.v1 import results_pb2
from scheduler_svc.service import SchedulerService
from servicekit.bus import BusUnavailable, keys
from servicekit.bus.calls import Append, Call, CountWaiting, Fetch, Hello, Leave, Pair, Renew, SessionKind, Waiting

OTHER = b"o" * 16


@pytest.mark.parametrize("poison", [b"\xff\xff", b"", "error", "contradiction"])
def test_a_bad_result_ends_the_epoch_and_the_service_goes_on(poison: bytes | str) -> None:
    bus = MemoryBus()
    with scheduler(bus) as service, Worker(bus) as worker:
        client = Client(bus)
        first = client.submit(1, prompt(1))
        client.wait((first, 0))
        message = results_pb2.StepResult(scheduler_session=session_of(bus, "s"), step=10**6)
        message.origin.session = worker.incarnation
        if poison == "error":
            message.error.code = 10
        worker.spoil = poison if isinstance(poison, bytes) else message.SerializeToString()
        ids = [client.submit(number, prompt(number), max_tokens=20) for number in range(2, 8)]
        client.wait(*((request_id, 0) for request_id in ids))
        for number, request_id in enumerate(ids, 2):
            assert client.tokens[request_id, 0] == expected(number, prompt(number), 20)
        assert worker.num_incarnations == 2
        assert service.stats().num_requests == 0
        letters = client.dead_letters()
        assert [letter[keys.STREAM] for letter in letters] == ([] if poison == "error" else [b"results:w"])
        assert service.meters.dead_letters["results"] == len(letters)


def test_sequences_of_a_worker_that_dies_go_on_at_another() -> None:
    bus = MemoryBus()
    with scheduler(bus) as service, Worker(bus, "w2", 0) as second:
        second.is_held.set()
        client = Client(bus)
        with Worker(bus, "w1", 0) as first:
            until(lambda: len(service.incarnations()) == 2, "both pairings")
            ids = [client.submit(number, prompt(number), max_tokens=30) for number in range(1, 7)]
            until(lambda: first.num_steps > 5, "a few steps")
        second.is_held.clear()
        client.wait(*((request_id, 0) for request_id in ids))
        for number, request_id in enumerate(ids, 1):
            assert client.tokens[request_id, 0] == expected(number, prompt(number), 30)


class _LosesAPairing(MemoryBus):
    """Loses the answer to the second pairing, and at that moment another scheduler comes."""

    num_pairings = 0

    def apply(self, calls: Sequence[Call[Any]], wake: Callable[[], None]) -> list[Any]:
        answers = super().apply(calls, wake)
        num_new = sum(isinstance(each, Pair) and each.sid != OTHER for each in calls)
        self.num_pairings += num_new
        if num_new and self.num_pairings == 2:
            super().apply([Hello(OTHER, SessionKind.SCHEDULER, "other", "", 600_000)], wake)
            raise BusUnavailable("broken")
        return answers


def test_a_worker_whose_pairing_was_not_heard_of_is_free_for_another_scheduler() -> None:
    bus = _LosesAPairing()
    with Worker(bus, "w1", 0), scheduler(bus) as service:
        until(lambda: len(service.incarnations()) == 1, "the first pairing")
        with Worker(bus, "w2", 0):
            connection = bus.connect()
            until(lambda: any(connection.call(Pair(OTHER, name)) for name in ("w1", "w2")), "a worker for the other")
            assert len(service.incarnations()) == 1


@pytest.mark.parametrize("leaves", [True, False], ids=["leaves", "dies"])
def test_only_a_worker_that_dies_strikes_what_it_computed(leaves: bool) -> None:
    bus = MemoryBus()
    client = Client(bus)
    with scheduler(bus) as service, Worker(bus, "first") as first:
        first.is_held.set()
        until(lambda: len(service.incarnations()) == 1, "the pairing")
        request_id = client.submit(1, prompt(1))
        until(lambda: service.stats().workers["first"].num_plans_in_flight == 2, "a full window")
        with Worker(bus, "second"):
            until(lambda: len(service.incarnations()) == 2, "the second")
            client.connection.call(Leave(first.incarnation) if leaves else Renew(first.incarnation, -1))
            client.wait((request_id, 0))
        assert client.tokens[request_id, 0] == expected(1, prompt(1))
    stored = client.connection.call(Fetch(request_id))
    assert stored is not None
    assert stored.strikes == (0 if leaves else 1)
    recovered = {sample.labels["lost"]: sample.value for sample in samples(service) if sample.name.endswith("_count")}
    assert recovered == {"worker": 0 if leaves else 1, "scheduler": 0}


def samples(service: SchedulerService) -> list[Sample]:
    return [sample for family in service.meters.recoveries.collect() for sample in family.samples]


def test_results_of_another_epoch_are_dropped() -> None:
    bus = MemoryBus()
    with scheduler(bus), Worker(bus) as worker:
        client = Client(bus)
        first = client.submit(1, prompt(1))
        client.wait((first, 0))
        stray = results_pb2.StepResult(scheduler_session=b"x" * 16, step=1)
        stray.origin.session = worker.incarnation
        client.connection.call(Append(bus.keys.results("w"), {keys.PAYLOAD: stray.SerializeToString()}))
        second = client.submit(2, prompt(2))
        client.wait((second, 0))
        assert worker.num_incarnations == 1
        assert not client.dead_letters()


@pytest.mark.parametrize("part", ["meta", "body"])
def test_a_request_that_cannot_be_read_fails_alone(part: str) -> None:
    bus = MemoryBus()
    with scheduler(bus) as service, Worker(bus):
        client = Client(bus)
        bad = client.submit(1, prompt(1), n=2, **{part: b"\xff\xff"})
        good = client.submit(2, prompt(2))
        client.wait((good, 0), (bad, 0), *([(bad, 1)] if part == "meta" else []))
        assert client.errors[bad].code == ErrorCode.INTERNAL
        assert client.tokens[good, 0] == expected(2, prompt(2))
        assert [letter[keys.STREAM] for letter in client.dead_letters()] == [b"requests"]
        assert service.meters.dead_letters["requests"] == 1


def test_a_malformed_cancel_is_buried() -> None:
    bus = MemoryBus()
    with scheduler(bus) as service:
        client = Client(bus)
        client.connection.call(Append(bus.keys.cancels, {keys.REQUEST: b"r" * 16, keys.REASON: b"soon"}))
        until(lambda: service.meters.dead_letters["cancels"] == 1, "the dead letter")
        until(lambda: len(client.dead_letters()) == 1, "the dead letter's entry")


@pytest.mark.parametrize("seed", range(3))
def test_lost_answers_and_repeated_calls_change_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler_svc.service.FULL_PAUSE_S", 0.001)
    bus = LossyBus(seed, share=0.2)
    with scheduler(bus.lossy(), session_ttl_s=60.0) as service, Worker(bus):
        client = Client(bus)
        ids = [client.submit(number, prompt(number), n=2, max_tokens=12) for number in range(1, 16)]
        client.wait(*((request_id, sequence) for request_id in ids for sequence in range(2)))
        for number, request_id in enumerate(ids, 1):
            for sequence in range(2):
                assert client.tokens[request_id, sequence] == expected(number, prompt(number), 12, sequence)
        until(lambda: service.stats().num_requests == 0, "the end")
        assert client.connection.call(CountWaiting()) == Waiting(0, 0, 0, 0)
    assert bus.num_losses > 10


def test_a_bus_that_goes_away_and_comes_back_is_a_pause() -> None:
    bus = MemoryBus()
    with scheduler(bus) as service, Worker(bus) as worker:
        client = Client(bus)
        worker.hold_after = 6
        ids = [client.submit(number, prompt(number), max_tokens=30) for number in range(1, 9)]
        until(worker.is_held.is_set, "a few steps")
        bus.stop()
        until(lambda: not service.is_ready(), "the scheduler's notice")
        assert service.last_progress_ns() > 0
        bus.start()
        worker.is_held.clear()
        client.come_back()
        client.wait(*((request_id, 0) for request_id in ids))
        for number, request_id in enumerate(ids, 1):
            assert client.tokens[request_id, 0] == expected(number, prompt(number), 30)
        assert service.is_ready()
