"""Shards that are taken over, shared, shortened and handed on."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from memory_bus import MemoryBus
from text_pipeline import ANSWER, GATEWAY, SCHEDULER, Client, Pool, eventually, running, text_of

from contract.domain.finish import FinishReason, Usage
from servicekit.bus import BusUnavailable
from servicekit.bus import keys as k
from servicekit.bus.calls import Call, Commit, Compact, Hello, LeaseShard, Length, ReleaseShard, Revalidate, SessionKind

SIBLING = b"d" * 16


def test_a_successor_rebuilds_from_the_log_and_goes_on(pool: Pool) -> None:
    ids = pool.ids(ANSWER)
    half = len(ids) // 2
    request_id = pool.open(1)
    client = Client(pool, request_id)
    with running(pool.detokenizer_service(name="first")):
        pool.commit(pool.rows(request_id, ids[:half]))
        eventually(lambda: client.take(pool.read_text()) or client.text)
    # Committed while nobody reads the shard.
    pool.commit(pool.rows(request_id, ids[half : half + 1], before=ids[:half]))
    with running(pool.detokenizer_service(name="second")):
        pool.commit(pool.rows(request_id, ids[half + 1 :], before=ids[: half + 1], end=FinishReason.LENGTH))
        eventually(client.has_ended)
    assert client.text == ANSWER


def test_a_request_that_ended_while_nobody_read_is_ended_by_the_successor(pool: Pool) -> None:
    request_id = pool.open(1)
    pool.generate(request_id, ANSWER)
    with running(pool.detokenizer_service()):
        rows = pool.read_until_end(request_id)
    assert text_of(rows) == ANSWER


def test_requests_that_have_ended_are_not_ended_again_by_a_successor(pool: Pool) -> None:
    ended, live = pool.open(1), pool.open(2)
    with running(pool.detokenizer_service()):
        pool.commit(pool.rows(live, pool.ids("x")))
        pool.generate(ended, ANSWER)
        pool.read_until_end(ended)
    service = pool.detokenizer_service()
    with running(service):
        assert not [row for row in pool.read_text() if row.request_id == ended]
        assert service.stats().num_live_requests == 1
        assert service.stats().num_retired == 0


def test_a_restarted_server_means_beginning_anew_from_the_log(pool: Pool) -> None:
    ids = pool.ids(ANSWER)
    request_id = pool.open(1)
    client = Client(pool, request_id)
    service = pool.detokenizer_service()
    with running(service):
        pool.commit(pool.rows(request_id, ids[:3]))
        eventually(lambda: client.take(pool.read_text()) or client.text)
        pool.restart()
        for sid, kind in ((SCHEDULER, SessionKind.SCHEDULER), (GATEWAY, SessionKind.GATEWAY)):
            pool.connection.call(Hello(sid, kind, kind.value, "", 60_000))
            assert pool.connection.call(Revalidate(sid, 60_000))
        pool.commit(pool.rows(request_id, ids[3:], before=ids[:3], end=FinishReason.LENGTH))
        eventually(client.has_ended)
        assert service.stats().num_rebuilds == 8
    assert client.text == ANSWER


def test_a_long_request_leaves_a_short_log_and_a_successor_that_knows_it_all(pool: Pool) -> None:
    limit = 24  # the log may always grow to a quarter of what the request takes
    log = pool.bus.keys.tokens(0)
    request_id = pool.open(1, n=2, logprobs=1, stop=["never", "the end"], max_tokens=1000)
    text = ANSWER * 40 + "the end of it"
    ids = pool.ids(text)
    client = Client(pool, request_id, n=2)
    pool.commit(pool.rows(request_id, ids[:3], sequence=1, end=FinishReason.STOP))
    committed: list[int] = []
    for turn in range(4):  # each time another process takes the shard
        service = pool.detokenizer_service(compact_entries=limit, session_ttl_s=0.5)
        with running(service):
            assert len(pool.entries(log)) <= limit + 1, "of all that was generated a successor reads so much"
            for token_id in ids[len(committed) : (turn + 1) * len(ids) // 4]:
                pool.commit(pool.rows(request_id, [token_id], before=committed, logprob=-0.25))
                committed.append(token_id)
                eventually(lambda: pool.connection.call(Length(log)) <= limit + 1)
            assert service.stats().num_compactions > 3
    with running(pool.detokenizer_service(compact_entries=limit)):
        eventually(client.has_ended)
        first, second = pool.result(request_id)
        eventually(lambda: pool.connection.call(Length(log)) == 0)
    assert first.text == client.text == ANSWER * 40
    assert (first.stop_reason, second.text) == ("the end", pool.tokenizer.decode(ids[:2]))
    assert first.token_ids == tuple(ids[: len(first.token_ids)])
    assert len(first.token_ids) > 400
    assert [entry.logprob for entry in first.logprobs] == [-0.25] * len(first.token_ids)
    assert second.usage == Usage(3, len(first.token_ids) + 3, 0)


def test_a_shard_that_another_held_meanwhile_is_rebuilt(pool: Pool) -> None:
    # While a holder sleeps, another one takes its shard, compacts the log and leaves; it must not go on with a gap.
    service = pool.detokenizer_service(session_ttl_s=0.5)
    ids = pool.ids(ANSWER)
    with running(service):
        request_id = pool.open(1)
        pool.commit(pool.rows(request_id, ids[:2]))
        eventually(lambda: service.stats().num_live_requests == 1)
        num_rebuilds = service.stats().num_rebuilds
        other = b"D" * 16
        pool.connection.call(Hello(other, SessionKind.SCHEDULER, "other", "", 60_000))
        (sleeper,) = eventually(lambda: pool.sessions(SessionKind.DETOKENIZER))  # its lease may have run out
        checkpoint = (request_id, pool.rows(request_id, ids[:4]))
        done = pool.connection.execute(
            [
                ReleaseShard(sleeper, 0),  # as if its lease had run out
                LeaseShard(other, 0),
                Commit(SCHEDULER, ((0, pool.rows(request_id, ids[2:4], before=ids[:2])),)),
                Compact(other, 0, b"9999999999999-0", (checkpoint,)),
                ReleaseShard(other, 0),
            ]
        )
        assert all(done[i] for i in (1, 2, 3))
        eventually(lambda: service.stats().num_rebuilds > num_rebuilds)
        pool.commit(pool.rows(request_id, ids[4:], before=ids[:4], end=FinishReason.LENGTH))
        assert text_of(pool.result(request_id)) == ANSWER


def test_the_log_is_trimmed_up_to_what_live_requests_need(pool: Pool) -> None:
    log = pool.bus.keys.tokens(0)
    with running(pool.detokenizer_service(session_ttl_s=0.5)):
        ended, live = pool.open(1), pool.open(2)
        pool.generate(ended, ANSWER)
        pool.read_until_end(ended)
        opening = next(entry for entry in pool.entries(log) if entry.fields.get(k.REQUEST) == live)
        eventually(lambda: pool.entries(log)[0].entry_id == opening.entry_id)
        pool.generate(live, ANSWER)
        eventually(lambda: pool.connection.call(Length(log)) <= 1)


def test_shards_are_shared_with_a_second_detokenizer(pool: Pool) -> None:
    first = pool.detokenizer_service(name="first", session_ttl_s=0.5)
    second = pool.detokenizer_service(name="second", session_ttl_s=0.5)
    with running(first):
        eventually(lambda: first.stats().num_shards == 4)
        with running(second):
            eventually(lambda: first.stats().num_shards == second.stats().num_shards == 2)
            for number, shard in enumerate(range(4), start=1):
                request_id = pool.open(number, shard=shard)
                pool.generate(request_id, ANSWER, shard=shard)
                assert text_of(pool.result(request_id)) == ANSWER
        eventually(lambda: first.stats().num_shards == 4)


class _BreakingBus(MemoryBus):
    """Breaks the connection once, at a call that the test chooses, and at that moment another detokenizer comes."""

    def __init__(self, breaks_at: Callable[[Call[Any]], bool], *, carries_out: bool) -> None:
        super().__init__()
        self._breaks_at: Callable[[Call[Any]], bool] | None = breaks_at
        self._carries_out = carries_out

    def apply(self, calls: Sequence[Call[Any]], wake: Callable[[], None]) -> list[Any]:
        if self._breaks_at is None or not any(map(self._breaks_at, calls)):
            return super().apply(calls, wake)
        self._breaks_at = None
        if self._carries_out:
            super().apply(calls, wake)
        super().apply([Hello(SIBLING, SessionKind.DETOKENIZER, "sibling", "", 600_000)], wake)
        raise BusUnavailable("broken")


@pytest.mark.parametrize("carries_out", [True, False])
def test_a_lease_of_which_the_answer_was_lost_does_not_keep_a_sibling_from_the_shard(
    model: Path, carries_out: bool
) -> None:
    seen: list[int] = []

    def is_third(call: Call[Any]) -> bool:
        is_asking = isinstance(call, LeaseShard) and not call.held and call.sid != SIBLING
        seen.extend([call.shard] if is_asking else ())
        return len(set(seen)) == 3

    pool = Pool(model, _BreakingBus(is_third, carries_out=carries_out))
    service = pool.detokenizer_service(session_ttl_s=6.0)
    with running(service):
        eventually(lambda: [pool.connection.call(LeaseShard(SIBLING, shard)) for shard in range(4)].count(True) == 2)
        assert service.stats().num_shards == 2


@pytest.mark.parametrize("carries_out", [True, False])
def test_a_shard_that_is_given_back_by_a_call_that_is_lost_is_given_back(model: Path, carries_out: bool) -> None:
    pool = Pool(model, _BreakingBus(lambda call: isinstance(call, ReleaseShard), carries_out=carries_out))
    service = pool.detokenizer_service(session_ttl_s=6.0)
    with running(service):
        eventually(lambda: service.stats().num_shards == 4)
        second = b"2" * 16
        pool.connection.call(Hello(second, SessionKind.DETOKENIZER, "second", "", 600_000))
        # With the sibling that comes, three share four shards: this one keeps two, as if there were one other.
        eventually(lambda: [pool.connection.call(LeaseShard(second, shard)) for shard in range(4)].count(True) == 2)
        assert service.stats().num_shards == 2


def test_a_shard_that_another_has_taken_is_let_go(pool: Pool) -> None:
    service = pool.detokenizer_service(session_ttl_s=0.5)
    with running(service):
        eventually(lambda: service.stats().num_shards == 4)
        usurper = b"U" * 16
        pool.connection.call(Hello(usurper, SessionKind.SCHEDULER, "usurper", "", 60_000))
        (holder,) = eventually(lambda: pool.sessions(SessionKind.DETOKENIZER))  # its lease may have run out
        pool.connection.execute([ReleaseShard(holder, 2), LeaseShard(usurper, 2)])
        eventually(lambda: service.stats().num_shards == 3)


def test_draining_waits_for_live_requests_if_nobody_else_can_take_them(pool: Pool) -> None:
    service = pool.detokenizer_service()
    with running(service) as stop:
        request_id = pool.open(1)
        eventually(lambda: service.stats().num_live_requests)
        stop.drain()
        eventually(lambda: service.status().draining)
        pool.generate(request_id, ANSWER)
        assert text_of(pool.result(request_id)) == ANSWER


def test_draining_hands_live_requests_to_another_detokenizer(pool: Pool) -> None:
    first = pool.detokenizer_service(name="first", session_ttl_s=0.5)
    second = pool.detokenizer_service(name="second", session_ttl_s=0.5)
    ids = pool.ids(ANSWER)
    with running(second):
        with running(first) as stop:
            eventually(lambda: first.stats().num_shards == second.stats().num_shards == 2)
            live = [pool.open(number, shard=shard) for number, shard in enumerate(range(4), start=1)]
            for shard, request_id in enumerate(live):
                pool.commit(pool.rows(request_id, ids[:4]), shard)
            eventually(lambda: first.stats().num_live_requests == second.stats().num_live_requests == 2)
            stop.drain()
            eventually(lambda: second.stats().num_live_requests == 4)
        for shard, request_id in enumerate(live):
            pool.commit(pool.rows(request_id, ids[4:], before=ids[:4], end=FinishReason.LENGTH), shard)
            assert text_of(pool.result(request_id)) == ANSWER
