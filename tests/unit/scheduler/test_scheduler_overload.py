"""What a scheduler does when it has no room, and when nobody reads what it writes."""

import time

from memory_bus import MemoryBus
from paged_worker import reference
from scheduler_pool import LIMITS, Client, Worker, scheduler, until
from watched_bus import WatchedBus

from contract.domain import chain
from contract.domain.errors import ErrorCode
from contract.domain.finish import CancelReason, FinishReason
from servicekit.bus.calls import (
    Commit,
    CountWaiting,
    Hello,
    LeaseShard,
    Length,
    LogBacklogs,
    SessionKind,
    Waiting,
)

HOME = 1


def expected(number: int, prompt: list[int], max_tokens: int) -> list[int]:
    return reference(prompt, chain.sequence_seed(number, 0), (), 0, min(LIMITS.capacity, len(prompt) + max_tokens))[0]


def prompt(number: int) -> list[int]:
    return [(number + position) % 11 for position in range(9)]


def test_no_steps_are_planned_while_nobody_reads_the_log_and_nothing_is_lost_when_somebody_does() -> None:
    bus = WatchedBus()
    with scheduler(bus, max_log_backlog=400) as service, Worker(bus, home_shard=HOME) as worker:
        until(lambda: len(service.incarnations()) == 1, "the pairing")
        client = Client(bus)
        log = bus.keys.tokens(HOME)
        ids = [client.submit(number, prompt(number), max_tokens=40) for number in range(1, 201)]
        until(
            lambda: (
                service.meters.log_backlogs.get(HOME, 0) > 400 and service.stats().workers["w"].num_plans_in_flight == 0
            ),
            "the scheduler to stop",
        )
        assert service.stats().num_running_seqs > 0

        def watch(times: int) -> tuple[int, int]:
            """How much there is when the scheduler has looked so often."""
            seen = bus.counts[LogBacklogs]
            until(lambda: bus.counts[LogBacklogs] >= seen + times, "the scheduler to look again and again")
            return client.connection.call(Length(log)), worker.num_steps

        length, num_steps = watch(2)  # by then the rows of its last results are written
        assert watch(5) == (length, num_steps)
        holder = b"d" * 16
        client.connection.call(Hello(holder, SessionKind.DETOKENIZER, "d", "", 600_000))

        def have_ended() -> bool:
            client.read()
            num_read = client.connection.call(Length(log))
            assert client.connection.call(LeaseShard(holder, HOME, num_read=num_read))
            return all((request_id, 0) in client.finishes for request_id in ids)

        until(have_ended, "the ends of all")
        for number, request_id in enumerate(ids, 1):
            assert client.tokens[request_id, 0] == expected(number, prompt(number), 40)
            assert client.finishes[request_id, 0] == FinishReason.LENGTH


def test_one_detokenizer_that_is_behind_does_not_hold_up_the_worker_of_another() -> None:
    bus = WatchedBus()
    with (
        scheduler(bus, max_log_backlog=1000) as service,
        Worker(bus, "a", home_shard=0),
        Worker(bus, "b", home_shard=1),
    ):
        until(lambda: len(service.incarnations()) == 2, "both workers")
        client = Client(bus)
        stray = [(0, b"\xff")] * 1500  # nobody reads shard 0
        client.connection.call(Commit(b"c" * 16, tuple(stray)))
        until(lambda: service.meters.log_backlogs.get(0, 0) > 1000, "the scheduler to notice")
        client.positions = {bus.keys.tokens(1): b"0-0"}
        ids = [client.submit(number, prompt(number)) for number in range(1, 9)]
        client.wait(*((request_id, 0) for request_id in ids))
        assert {stream for request_id in ids for stream in client.shards[request_id]} == {bus.keys.tokens(1)}


def test_deadlines_pass_wherever_a_request_waits_also_when_no_scheduler_has_room() -> None:
    bus = MemoryBus()
    with scheduler(bus, max_waiting_seqs=1) as service:
        client = Client(bus)
        client.submit(1, prompt(1))
        until(lambda: service.stats().num_requests == 1, "the claim that takes all room")
        soon_ns = time.time_ns() + 50_000_000
        ready = client.submit(2, prompt(2), deadline_ns=soon_ns)
        untokenized = client.submit(3, prompt(3), deadline_ns=soon_ns, is_tokenized=False)
        patient = client.submit(4, prompt(4))
        client.wait((ready, 0), (untokenized, 0))
        assert {client.errors[each].code for each in (ready, untokenized)} == {ErrorCode.DEADLINE_EXCEEDED}
        assert service.stats().num_requests == 1
        assert (patient, 0) not in client.finishes
        assert client.connection.call(CountWaiting()) == Waiting(2, 18, 2, 18)


def test_a_cancelled_request_makes_room_although_no_scheduler_has_any() -> None:
    bus = MemoryBus()
    with scheduler(bus, max_waiting_seqs=1) as service:
        client = Client(bus)
        client.submit(1, prompt(1))
        until(lambda: service.stats().num_requests == 1, "the claim that takes all room")
        request_id = client.submit(2, prompt(2), n=3)
        client.cancel(request_id, CancelReason.CLIENT)
        client.wait(*((request_id, sequence) for sequence in range(3)))
        assert {client.finishes[request_id, sequence] for sequence in range(3)} == {FinishReason.CANCELLED}
        assert client.connection.call(CountWaiting()).num_requests == 1


def test_what_got_a_slot_waits_no_longer() -> None:
    bus = MemoryBus()
    worker = Worker(bus)
    worker.is_held.set()
    with scheduler(bus) as service:
        client = Client(bus)
        for number in range(1, 1 + 2 * LIMITS.max_num_seqs):
            client.submit(number, prompt(number))
        until(lambda: service.stats().num_requests == 2 * LIMITS.max_num_seqs, "the claim of all")
        # All slots are given with the first plan; the second one, which follows at once, tells so.
        with worker:
            until(lambda: service.stats().num_running_seqs == LIMITS.max_num_seqs, "full slots")
            until(
                lambda: client.connection.call(CountWaiting()).num_requests == LIMITS.max_num_seqs, "the rest to wait"
            )
            worker.is_held.clear()
            until(lambda: client.connection.call(CountWaiting()) == Waiting(0, 0, 0, 0), "nobody to wait")


def test_what_has_tokens_waits_no_longer_although_no_plan_followed() -> None:
    bus = MemoryBus()
    with scheduler(bus, plans_in_flight=1), Worker(bus):
        client = Client(bus)
        request_id = client.submit(1, prompt(1), max_tokens=1)
        client.wait((request_id, 0))
        assert client.connection.call(CountWaiting()) == Waiting(0, 0, 0, 0)


def test_starts_that_a_scheduler_could_not_tell_any_more_are_told_by_its_successor() -> None:
    bus = MemoryBus()
    with Worker(bus) as worker:
        worker.is_held.set()
        client = Client(bus)
        with scheduler(bus, "a", plans_in_flight=1) as service:
            until(lambda: len(service.incarnations()) == 1, "the pairing")
            request_id = client.submit(1, prompt(1))
            until(lambda: client.connection.call(Length(bus.keys.steps("w"))) == 1, "its plan")
            assert client.connection.call(CountWaiting()).num_requests == 1
        worker.is_held.clear()
        with scheduler(bus, "b", plans_in_flight=1):
            client.wait((request_id, 0))
            assert client.connection.call(CountWaiting()) == Waiting(0, 0, 0, 0)
