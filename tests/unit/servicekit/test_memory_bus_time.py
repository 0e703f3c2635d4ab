"""What time does to a pool in memory, with a clock that the test turns."""

from dataclasses import dataclass, field

import pytest

from servicekit.bus import MemoryBus
from servicekit.bus.calls import (
    Append,
    Attach,
    Cancel,
    Fetch,
    Hello,
    LeaseShard,
    ListSessions,
    ReadGroup,
    Reclaim,
    Reject,
    Renew,
    Retire,
    SessionKind,
    Submit,
    Take,
)
from servicekit.bus.interface import Connection

FIRST, SECOND, REQUEST = b"first session id", b"second sessionid", b"a request's id!!"


@dataclass
class Clock:
    now_ms: int = 1_700_000_000_000

    def __call__(self) -> int:
        return self.now_ms


@dataclass
class Pool:
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.connection: Connection = MemoryBus(now_ms=self.clock).connect()


@pytest.fixture
def pool() -> Pool:
    return Pool()


def _hello(sid: bytes, ttl_ms: int) -> Hello:
    return Hello(sid, SessionKind.SCHEDULER, "s", "", ttl_ms)


def _submit() -> Submit:
    return Submit(REQUEST, "tenant", b"header", b"body", b"digest", FIRST, 1)


def test_a_lease_runs_out_at_its_last_millisecond(pool: Pool) -> None:
    pool.connection.execute([_hello(FIRST, 1000), _hello(SECOND, 60_000)])
    pool.clock.now_ms += 999
    assert pool.connection.call(Take(SECOND, FIRST)) is None
    pool.clock.now_ms += 1
    assert pool.connection.call(ListSessions())[0].alive is False
    assert pool.connection.call(Take(SECOND, FIRST)) == []
    assert not pool.connection.call(Renew(FIRST, 1000))


def test_a_renewal_counts_from_now(pool: Pool) -> None:
    pool.connection.execute([_hello(FIRST, 1000), _hello(SECOND, 60_000)])
    pool.clock.now_ms += 900
    assert pool.connection.call(Renew(FIRST, 1000))
    pool.clock.now_ms += 900
    assert pool.connection.call(Take(SECOND, FIRST)) is None


def test_a_shard_is_free_when_its_holders_lease_ran_out(pool: Pool) -> None:
    pool.connection.execute([_hello(FIRST, 1000), _hello(SECOND, 60_000), LeaseShard(FIRST, 0)])
    assert not pool.connection.call(LeaseShard(SECOND, 0))
    pool.clock.now_ms += 1000
    assert pool.connection.call(LeaseShard(SECOND, 0))


def test_a_dead_session_is_shown_for_a_minute(pool: Pool) -> None:
    pool.connection.call(_hello(FIRST, 1000))
    pool.clock.now_ms += 60_999
    assert len(pool.connection.call(ListSessions())) == 1
    pool.clock.now_ms += 1
    assert pool.connection.call(ListSessions()) == []


def test_a_result_is_readable_for_its_time(pool: Pool) -> None:
    pool.connection.execute([_hello(FIRST, 60_000), _submit(), Reject(REQUEST, b"", 0, b"row"), LeaseShard(FIRST, 0)])
    assert pool.connection.call(Retire(FIRST, 0, REQUEST, b"result", ttl_ms=5000))
    pool.clock.now_ms += 4999
    assert pool.connection.call(Attach(REQUEST, "tenant", FIRST, b"")).result == b"result"
    pool.clock.now_ms += 1
    assert not pool.connection.call(Attach(REQUEST, "tenant", FIRST, b"")).known
    assert pool.connection.call(Fetch(REQUEST)) is None


@pytest.mark.parametrize(("later_ms", "reason"), [(59_999, 3), (60_000, 0)])
def test_a_cancel_waits_a_minute_for_its_request(pool: Pool, later_ms: int, reason: int) -> None:
    pool.connection.call(Cancel(REQUEST, 3, 1))
    pool.clock.now_ms += later_ms
    pool.connection.call(_submit())
    stored = pool.connection.call(Fetch(REQUEST))
    assert stored is not None
    assert stored.cancel_reason == reason


def test_a_second_mark_waits_its_own_minute(pool: Pool) -> None:
    pool.connection.call(Cancel(REQUEST, 3, 1))
    pool.clock.now_ms += 30_000
    pool.connection.call(Cancel(REQUEST, 4, 1))
    pool.clock.now_ms += 30_000
    pool.connection.call(_submit())
    stored = pool.connection.call(Fetch(REQUEST))
    assert stored is not None
    assert stored.cancel_reason == 4


def test_hints_are_reclaimed_after_their_idle_time(pool: Pool) -> None:
    pool.connection.execute([Append(b"s", {b"n": b"1"}), ReadGroup(b"s", b"g", b"one", 1)])
    pool.clock.now_ms += 99
    assert pool.connection.call(Reclaim(b"s", b"g", b"two", 100, 10)) == []
    pool.clock.now_ms += 1
    assert len(pool.connection.call(Reclaim(b"s", b"g", b"two", 100, 10))) == 1
    assert pool.connection.call(Reclaim(b"s", b"g", b"three", 100, 10)) == []


def test_entry_ids_grow_when_the_clock_goes_back(pool: Pool) -> None:
    first = pool.connection.call(Append(b"s", {b"n": b"1"}))
    pool.clock.now_ms -= 5000
    second, third = pool.connection.execute([Append(b"s", {b"n": b"2"}), Append(b"s", {b"n": b"3"})])
    pool.clock.now_ms += 6000
    fourth = pool.connection.call(Append(b"s", {b"n": b"4"}))
    ids = [tuple(map(int, entry_id.split(b"-"))) for entry_id in (first, second, third, fourth)]
    assert ids == sorted(set(ids))
