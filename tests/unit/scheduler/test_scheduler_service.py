"""The service over the bus in memory: whole lives of requests, and what happens when others misbehave."""

import time

import numpy as np
import pytest
from paged_worker import reference
from prometheus_client.samples import Sample
from scheduler_pool import LIMITS, Client, LossyBus, Worker, scheduler, until

from penstock.domain import chain
from penstock.domain.errors import ErrorCode
from penstock.domain.finish import FinishReason
from penstock.v1 import results_pb2
from scheduler_svc.service import SchedulerService
from servicekit.bus import MemoryBus, keys
from servicekit.bus.calls import (
    Append,
    Fetch,
    Hello,
    Leave,
    ListSessions,
    Pair,
    RegisterWorker,
    Renew,
    SessionKind,
    Take,
)


def expected(number: int, prompt: list[int], max_tokens: int = 8, sequence: int = 0) -> list[int]:
    seed = chain.sequence_seed(number, sequence)
    return reference(prompt, seed, (), 0, min(LIMITS.capacity, len(prompt) + max_tokens))[0]


def prompt(number: int, length: int = 9) -> list[int]:
    return [(number + position) % 11 for position in range(length)]


def session_of(bus: MemoryBus, name: str) -> bytes:
    sessions = bus.connect().call(ListSessions())
    return next(session.sid for session in sessions if session.name == name and session.alive)


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


def test_requests_that_came_before_a_worker_are_served_when_it_comes() -> None:
    bus = MemoryBus()
    with scheduler(bus) as service:
        client = Client(bus)
        request_id = client.submit(1, prompt(1))
        until(lambda: service.stats().num_waiting_seqs == 1, "the claim")
        with Worker(bus):
            client.wait((request_id, 0))
        assert client.tokens[request_id, 0] == expected(1, prompt(1))


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
        until(lambda: service.meters.cancels.histograms()[0][1] > 0, "the cancel")
        worker.is_held.clear()
        client.wait((request_id, 0))
        assert client.tokens[request_id, 0] == expected(1, prompt(1), 20)
        until(lambda: service.stats().num_requests == 0, "the end")
        assert (request_id, 1) not in client.finishes


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
    recovered = {sample.labels["what"]: sample.value for sample in samples(service) if sample.name.endswith("_count")}
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


def test_a_fenced_scheduler_starts_over_and_what_it_held_goes_on_elsewhere() -> None:
    bus = MemoryBus()
    with scheduler(bus, "s1") as service, Worker(bus) as worker:
        client = Client(bus)
        until(lambda: len(service.incarnations()) == 1, "the pairing")
        worker.is_held.set()
        ids = [client.submit(number, prompt(number), n=2, max_tokens=20) for number in range(1, 5)]
        until(lambda: service.stats().num_running_seqs == 4, "the admission")
        sid = session_of(bus, "s1")
        client.connection.call(Leave(sid))  # as if its lease had run out
        worker.is_held.clear()
        client.wait(*((request_id, sequence) for request_id in ids for sequence in range(2)))
        assert session_of(bus, "s1") != sid
        for number, request_id in enumerate(ids, 1):
            for sequence in range(2):
                assert client.tokens[request_id, sequence] == expected(number, prompt(number), 20, sequence)


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
    assert bus.num_losses > 10


def test_another_scheduler_takes_over_behind_the_tokens_in_the_log() -> None:
    bus = MemoryBus()
    client = Client(bus)
    with Worker(bus) as worker:
        with scheduler(bus, "s1"):
            ids = [client.submit(number, prompt(number), n=2, max_tokens=30) for number in range(1, 5)]
            until(lambda: worker.num_steps > 8, "a few steps")
        client.read()
        partial = {key: list(tokens) for key, tokens in client.tokens.items()}
        assert any(0 < len(tokens) < 30 for tokens in partial.values())
        with scheduler(bus, "s2"):
            client.wait(*((request_id, sequence) for request_id in ids for sequence in range(2)))
    for number, request_id in enumerate(ids, 1):
        for sequence in range(2):
            assert client.tokens[request_id, sequence] == expected(number, prompt(number), 30, sequence)


def test_another_scheduler_takes_over_behind_the_tokens_in_checkpoints() -> None:
    bus = MemoryBus()
    client = Client(bus)
    with Worker(bus) as worker:
        with scheduler(bus, "s1"):
            ids = [client.submit(number, prompt(number), n=2, max_tokens=30) for number in range(1, 5)]
            until(lambda: worker.num_steps > 8, "a few steps")
        client.compact()
        known = {key: len(tokens) for key, tokens in client.tokens.items()}
        assert any(0 < number < 30 for number in known.values())
        with scheduler(bus, "s2"):
            client.wait(*((request_id, sequence) for request_id in ids for sequence in range(2)))
    for number, request_id in enumerate(ids, 1):
        for sequence in range(2):
            assert client.tokens[request_id, sequence] == expected(number, prompt(number), 30, sequence)
    new = [position for key, position in client.logged() if position < known.get(key, 0)]
    assert not new, "what checkpoints have is not generated again"


def test_a_lost_request_goes_on_behind_what_its_client_has() -> None:
    bus = MemoryBus()
    wanted = [expected(1, prompt(1), 30, sequence) for sequence in range(2)]
    with scheduler(bus) as service, Worker(bus) as worker:
        client = Client(bus)
        request_id = client.submit(1, prompt(1), n=2, max_tokens=30, witness=[wanted[0][:12], wanted[1][:3]])
        client.wait((request_id, 0), (request_id, 1))
        assert [client.tokens[request_id, sequence] for sequence in range(2)] == wanted
        assert worker.num_steps <= 30 - 3 + 1, "what clients have is not generated again"
        assert service.meters.num_restored_tokens == 15


def test_a_lost_request_whose_client_has_everything_ends_as_it_had() -> None:
    bus = MemoryBus()
    with scheduler(bus), Worker(bus) as worker:
        client = Client(bus)
        request_id = client.submit(1, prompt(1), max_tokens=9, witness=[expected(1, prompt(1), 9)])
        client.wait((request_id, 0))
        assert client.tokens[request_id, 0] == expected(1, prompt(1), 9)
        assert client.finishes[request_id, 0] is FinishReason.LENGTH
        assert worker.num_steps == 0


@pytest.mark.parametrize("num_lost", [1, 8])
def test_a_taken_request_whose_log_lost_rows_goes_on_behind_its_witness(num_lost: int) -> None:
    bus = MemoryBus()
    client = Client(bus)
    with Worker(bus) as worker:
        with scheduler(bus, "s1"):
            request_id = client.submit(1, prompt(1), max_tokens=30)
            until(lambda: worker.num_steps > 8, "a few steps")
        client.read()
        known = len(client.tokens[request_id, 0])
        wanted = expected(1, prompt(1), 30)
        client.submit(1, prompt(1), max_tokens=30, witness=[wanted[: known + num_lost]])
        with scheduler(bus, "s2") as service:
            client.wait((request_id, 0))
            assert service.meters.num_restored_tokens == num_lost
    assert client.tokens[request_id, 0] == wanted


def test_a_witness_of_another_history_ends_its_request_without_a_splice() -> None:
    bus = MemoryBus()
    client = Client(bus)
    with Worker(bus) as worker:
        with scheduler(bus, "s1"):
            request_id = client.submit(1, prompt(1), n=2, max_tokens=30)
            other = client.submit(2, prompt(2), max_tokens=30)
            until(lambda: worker.num_steps > 8, "a few steps")
        wrong = expected(1, prompt(1), 30)
        wrong[1] += 1
        client.submit(1, prompt(1), n=2, max_tokens=30, witness=[wrong[:20], []])
        with scheduler(bus, "s2") as service:
            client.wait((request_id, 0), (request_id, 1), (other, 0))
            assert service.stats().num_requests == 0
    assert client.errors[request_id].code is ErrorCode.STREAM_DIVERGED
    for sequence in range(2):
        tokens = client.tokens[request_id, sequence]
        assert tokens == expected(1, prompt(1), 30, sequence)[: len(tokens)]
    assert client.tokens[other, 0] == expected(2, prompt(2), 30)


def test_two_schedulers_share_the_workers() -> None:
    bus = MemoryBus()
    with scheduler(bus, "s1") as one, scheduler(bus, "s2") as two:
        until(lambda: one.is_ready() and two.is_ready(), "both schedulers")
        with Worker(bus, "w1", 0), Worker(bus, "w2", 1):
            until(lambda: len(one.incarnations()) == len(two.incarnations()) == 1, "one worker for each")
            client = Client(bus)
            ids = [client.submit(number, prompt(number)) for number in range(1, 20)]
            client.wait(*((request_id, 0) for request_id in ids))


def test_a_scheduler_without_a_worker_hands_its_requests_to_one_that_has_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler_svc.dispatch.HAND_OVER_NS", 100_000_000)
    bus = MemoryBus()
    other = b"o" * 16
    with scheduler(bus, "s1") as service:
        client = Client(bus)
        request_id = client.submit(1, prompt(1))
        until(lambda: service.stats().num_waiting_seqs == 1, "the claim")
        first = session_of(bus, "s1")
        info = results_pb2.WorkerInfo(num_blocks=1, block_size=1, max_num_seqs=1, max_model_len=1)
        client.connection.execute(
            [
                Hello(other, SessionKind.SCHEDULER, "other", "", 60_000),
                Hello(b"w" * 16, SessionKind.WORKER, "w", "", 60_000),
                RegisterWorker(b"w" * 16, "w", info.SerializeToString()),
                Pair(other, "w"),
            ]
        )
        taken: list[bytes] = []

        def has_taken() -> bool:
            answer = client.connection.call(Take(other, first))
            taken.extend(answer if isinstance(answer, list) else ())
            return bool(taken)

        until(has_taken, "the hand-over")
        assert taken == [request_id]
        until(lambda: session_of(bus, "s1") != first, "the new session")
        assert service.stats().num_requests == 0


def test_a_bus_that_goes_away_and_comes_back_is_a_pause() -> None:
    bus = MemoryBus()
    with scheduler(bus) as service, Worker(bus) as worker:
        client = Client(bus)
        ids = [client.submit(number, prompt(number), max_tokens=30) for number in range(1, 9)]
        until(lambda: worker.num_steps > 5, "a few steps")
        bus.stop()
        until(lambda: not service.is_ready(), "the scheduler's notice")
        assert service.last_progress_ns() > 0
        bus.start()
        client.come_back()
        client.wait(*((request_id, 0) for request_id in ids))
        for number, request_id in enumerate(ids, 1):
            assert client.tokens[request_id, 0] == expected(number, prompt(number), 30)
        assert service.is_ready()


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
