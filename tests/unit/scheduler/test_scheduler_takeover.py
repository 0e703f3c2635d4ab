"""Requests that another session began: behind checkpoints, log and witness."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from memory_bus import MemoryBus
from scheduler_pool import Client, Worker, expected, prompt, scheduler, session_of, until

from contract.domain.errors import ErrorCode
from contract.domain.finish import FinishReason
from contract.v1 import results_pb2
from servicekit.bus.calls import Hello, Leave, Pair, RegisterWorker, SessionKind, Take


def test_a_fenced_scheduler_starts_over_and_what_it_held_goes_on_elsewhere() -> None:
    bus = MemoryBus()
    worker = Worker(bus)
    worker.is_held.set()
    with scheduler(bus, "s1") as service:
        client = Client(bus)
        ids = [client.submit(number, prompt(number), n=2, max_tokens=20) for number in range(1, 5)]
        until(lambda: service.stats().num_requests == 4, "the claim of all")
        # The worker comes after all of them: what the first two plans do not have waits until one of these comes back.
        with worker:
            until(lambda: service.stats().num_running_seqs == 4, "the admission")
            sid = session_of(bus, "s1")
            client.connection.call(Leave(sid))  # as if its lease had run out
            worker.is_held.clear()
            client.wait(*((request_id, sequence) for request_id in ids for sequence in range(2)))
            session_of(bus, "s1", after=sid)
        for number, request_id in enumerate(ids, 1):
            for sequence in range(2):
                assert client.tokens[request_id, sequence] == expected(number, prompt(number), 20, sequence)


def test_a_scheduler_without_a_worker_hands_its_requests_to_one_that_has_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler_svc.neighbours.HAND_OVER_NS", 100_000_000)
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
        session_of(bus, "s1", after=first)
        # The session is known to the bus a moment before it is the service's.
        until(lambda: service.stats().num_requests == 0, "the new session")


@contextmanager
def a_few_steps(bus: MemoryBus, worker: Worker) -> Iterator[None]:
    """A scheduler for those steps and no more, however long it takes to go away."""
    worker.hold_after = 9
    with scheduler(bus, "s1"):
        yield
        until(worker.is_held.is_set, "a few steps")
    worker.is_held.clear()


def left_behind(bus: MemoryBus, client: Client, worker: Worker) -> list[bytes]:
    """Four requests of two samples that a scheduler has begun, which is gone."""
    with a_few_steps(bus, worker):
        return [client.submit(number, prompt(number), n=2, max_tokens=30) for number in range(1, 5)]


def test_another_scheduler_takes_over_behind_the_tokens_in_the_log() -> None:
    bus = MemoryBus()
    client = Client(bus)
    with Worker(bus) as worker:
        ids = left_behind(bus, client, worker)
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
        ids = left_behind(bus, client, worker)
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
        with a_few_steps(bus, worker):
            request_id = client.submit(1, prompt(1), max_tokens=30)
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
        with a_few_steps(bus, worker):
            request_id = client.submit(1, prompt(1), n=2, max_tokens=30)
            other = client.submit(2, prompt(2), max_tokens=30)
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
