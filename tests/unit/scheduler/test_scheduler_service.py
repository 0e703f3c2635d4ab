"""The service over the bus in memory: whole lives of requests."""

import time
from itertools import count

import numpy as np
import pytest
from memory_bus import MemoryBus
from scheduler_pool import Client, Worker, expected, prompt, scheduler, until

from contract.domain.errors import ErrorCode
from contract.domain.finish import FinishReason
from servicekit.bus.calls import Cancel, Hello, LeaseShard, ListSessions, SessionKind


def test_requests_are_claimed_computed_and_logged_in_the_home_shard_of_their_worker() -> None:
    bus = MemoryBus()
    with scheduler(bus) as service, Worker(bus) as worker:
        until(lambda: len(service.incarnations()) == 1, "the pairing")
        client = Client(bus)
        ids = [client.submit(number, prompt(number), n=2) for number in range(1, 13)]
        client.wait(*((request_id, sequence) for request_id in ids for sequence in range(2)))
        for number, request_id in enumerate(ids, 1):
            for sequence in range(2):
                assert client.tokens[request_id, sequence] == expected(number, prompt(number), sequence=sequence)
                assert client.finishes[request_id, sequence] == FinishReason.LENGTH
            assert client.shards[request_id] == {bus.keys.tokens(1)}
        assert sorted(client.opened) == ids
        assert worker.num_incarnations == 1
        assert service.stats().num_requests == 0
        assert service.stats().counters.num_generated_tokens == 12 * 2 * 8
        assert service.is_ready()


@pytest.mark.parametrize("first_ones", [(0, 1), (0, 2), (0, 3)])
def test_workers_write_to_shards_of_different_detokenizers(first_ones: tuple[int, int]) -> None:
    bus = MemoryBus()
    detokenizers = (b"d" * 16, b"e" * 16)
    holders = {shard: detokenizers[shard not in first_ones] for shard in range(4)}
    client = Client(bus)
    client.positions = {bus.keys.tokens(shard): b"0-0" for shard in holders}
    for sid in detokenizers:
        client.connection.call(Hello(sid, SessionKind.DETOKENIZER, "d", "", 60_000))
    assert all(client.connection.execute([LeaseShard(sid, shard) for shard, sid in holders.items()]))
    with (
        scheduler(bus, num_shards=4) as service,
        Worker(bus, "worker-0", home_shard=None),
        Worker(bus, "worker-1", home_shard=None),
    ):
        until(lambda: len(service.incarnations()) == 2, "both workers")
        written: set[bytes] = set()
        numbers = count(1)

        def both_get_work() -> bool:
            request_id = client.submit(number := next(numbers), prompt(number))
            client.wait((request_id, 0))
            written.update(client.shards[request_id])
            return {sid for shard, sid in holders.items() if bus.keys.tokens(shard) in written} == set(detokenizers)

        until(both_get_work, "rows for both detokenizers")


def test_requests_that_came_before_a_worker_are_served_when_it_comes() -> None:
    bus = MemoryBus()
    with scheduler(bus) as service:
        client = Client(bus)
        request_id = client.submit(1, prompt(1))
        until(lambda: service.stats().num_waiting_seqs == 1, "the claim")
        with Worker(bus):
            client.wait((request_id, 0))
        assert client.tokens[request_id, 0] == expected(1, prompt(1))


def test_two_schedulers_share_the_workers() -> None:
    bus = MemoryBus()
    with scheduler(bus, "s1") as one, scheduler(bus, "s2") as two:
        until(lambda: one.is_ready() and two.is_ready(), "both schedulers")
        with Worker(bus, "w1", 0), Worker(bus, "w2", 1):
            until(lambda: len(one.incarnations()) == len(two.incarnations()) == 1, "one worker for each")
            client = Client(bus)
            ids = [client.submit(number, prompt(number)) for number in range(1, 20)]
            client.wait(*((request_id, 0) for request_id in ids))


def test_deadlines_and_cancels_count_without_any_worker() -> None:
    bus = MemoryBus()
    with scheduler(bus):
        client = Client(bus)
        late = client.submit(1, prompt(1), deadline_ns=time.time_ns() + 50_000_000)
        unwanted = client.submit(2, prompt(2))
        client.cancel(unwanted)
        client.wait((late, 0), (unwanted, 0))
        assert client.errors[late].code == ErrorCode.DEADLINE_EXCEEDED
        assert client.finishes[unwanted, 0] == FinishReason.CANCELLED


def test_a_cancel_before_the_claim_counts() -> None:
    bus = MemoryBus()
    client = Client(bus)
    request_id = client.submit(1, prompt(1), n=2)
    client.cancel(request_id)
    with scheduler(bus), Worker(bus):
        client.wait((request_id, 0), (request_id, 1))
    assert client.finishes[request_id, 1] == FinishReason.CANCELLED
    assert client.tokens[request_id, 0] == []


def test_the_blocks_of_a_cancelled_request_are_free_without_another_step() -> None:
    bus = MemoryBus()
    with scheduler(bus) as service, Worker(bus) as worker:
        client = Client(bus)
        until(lambda: len(service.incarnations()) == 1, "the pairing")
        worker.is_held.set()
        cancelled = client.submit(1, prompt(1), max_tokens=20)
        until(lambda: service.stats().workers["w"].num_plans_in_flight == 2, "a full window")
        assert service.stats().workers["w"].num_used_blocks > 0
        client.cancel(cancelled)
        until(lambda: service.stats().workers["w"].num_used_blocks == 0, "free blocks")
        client.wait((cancelled, 0))
        assert client.finishes[cancelled, 0] is FinishReason.CANCELLED
        assert worker.num_steps == 0


def test_a_stopped_sequence_leaves_while_its_sibling_goes_on() -> None:
    bus = MemoryBus()
    with scheduler(bus) as service, Worker(bus) as worker:
        client = Client(bus)
        worker.is_held.set()
        request_id = client.submit(1, prompt(1), n=2, max_tokens=20)
        until(lambda: service.stats().num_running_seqs > 0, "the admission")
        client.cancel(request_id, reason=2, sequence=1)
        until(lambda: sum(service.meters.cancels.wait.counts) > 0, "the cancel")
        worker.is_held.clear()
        client.wait((request_id, 0))
        assert client.tokens[request_id, 0] == expected(1, prompt(1), 20)
        until(lambda: service.stats().num_requests == 0, "the end")
        assert (request_id, 1) not in client.finishes


def test_draining_takes_nothing_new_and_ends_what_is_held() -> None:
    bus = MemoryBus()
    with scheduler(bus) as service, Worker(bus) as worker:
        client = Client(bus)
        until(lambda: len(service.incarnations()) == 1, "the pairing")
        worker.is_held.set()
        held = client.submit(1, prompt(1))
        until(lambda: service.stats().num_running_seqs == 1, "the admission")
        assert service.drain() == 1
        assert not service.is_ready()
        client.submit(2, prompt(2))
        worker.is_held.clear()
        client.wait((held, 0))
        sessions = lambda: [s for s in bus.connect().call(ListSessions()) if s.kind is SessionKind.SCHEDULER]  # noqa: E731
        until(lambda: not any(session.alive for session in sessions()), "the scheduler's leave")
        assert len(client.opened) == 1


def test_status_shows_what_is_held() -> None:
    bus = MemoryBus()
    with scheduler(bus) as service, Worker(bus) as worker:
        client = Client(bus)
        until(lambda: len(service.incarnations()) == 1, "the pairing")
        worker.is_held.set()
        request_id = client.submit(1, prompt(1, 10))
        until(lambda: service.stats().num_running_seqs == 1, "the admission")
        status = service.status()
        assert status.ready
        assert (status.figures["running"], status.figures["blocks_used"], status.figures["workers"]) == (1, 3, 1)
        (info,) = service.list_requests()
        assert info.request_id == request_id
        (table,) = service.block_table(request_id) or ()
        assert len(table.block_ids) == len(table.ref_counts) == 3
        worker.is_held.clear()
        client.wait((request_id, 0))
        assert np.isclose(service.meters.step_tokens.total, 10 + 7)


def test_cancels_from_before_a_scheduler_began_did_not_wait_for_it() -> None:
    bus = MemoryBus()
    client, other = Client(bus), Client(bus)
    with scheduler(bus) as service, Worker(bus) as worker:
        until(lambda: len(service.incarnations()) == 1, "the pairing")
        worker.is_held.set()
        first, second = client.submit(1, [1, 2], max_tokens=4000), client.submit(2, [3, 4], max_tokens=4000)
        until(lambda: service.stats().num_requests == 2, "the claims")
        long_ago_ns = time.time_ns() - 60 * 10**9
        cancels = [Cancel(first, 1, long_ago_ns), Cancel(second, 1, time.time_ns())]
        assert other.connection.execute(cancels) == [True, True]
        until(lambda: service.stats().num_requests == 0, "both ends")
        (hop,) = (hop for hop in service.status().hops if hop.hop == "cancels")
        assert 0 < hop.wait_p99_s < 60
