"""What time does to a pool in memory, with a clock that the test turns."""

from dataclasses import dataclass, field, replace

import pytest
from memory_bus import MemoryBus

from servicekit.bus.calls import (
    Append,
    Attach,
    Cancel,
    Fetch,
    Hello,
    LeaseShard,
    Length,
    Limit,
    ListSessions,
    Metered,
    OverLimit,
    ReadGroup,
    Reclaim,
    Reject,
    Renew,
    Retire,
    SessionKind,
    Submit,
    SubmitOutcome,
    Take,
)
from servicekit.bus.interface import Connection
from servicekit.bus.keys import CANCELS_KEPT_MS, Keys

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


def test_hints_of_cancels_are_kept_for_a_minute(pool: Pool) -> None:
    pool.connection.execute([_hello(FIRST, 1000), _submit(), Cancel(REQUEST, 1, 1, sequence=0)])
    pool.clock.now_ms += CANCELS_KEPT_MS
    pool.connection.call(Cancel(REQUEST, 1, 1, sequence=1))
    assert pool.connection.call(Length(Keys().cancels)) == 2
    pool.clock.now_ms += 1
    pool.connection.call(Cancel(REQUEST, 1, 1, sequence=2))
    assert pool.connection.call(Length(Keys().cancels)) == 2


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


def _metered(number: int, *, rpm: int = 0, tpm: int = 0, tokens: int = 0) -> Submit:
    request_id = bytes([number]) * 16
    metered = Metered(b"key-1234", request_id, rpm=rpm, tpm=tpm, tokens=tokens, call_tokens=tokens)
    return replace(_submit(), request_id=request_id, metered=metered)


@pytest.mark.parametrize("limits", [{"rpm": 3}, {"tpm": 30, "tokens": 10}])
def test_a_call_beyond_a_keys_limit_passes_when_it_is_told_to_and_not_before(
    pool: Pool, limits: dict[str, int]
) -> None:
    for number in range(1, 4):  # at 0, 10.3 and 20.6 s
        assert pool.connection.call(_metered(number, **limits)) is SubmitOutcome.CREATED
        pool.clock.now_ms += 10_300
    for number in (4, 5):
        refused = pool.connection.call(_metered(number, **limits))
        assert isinstance(refused, OverLimit)
        pool.clock.now_ms += refused.wait_ms - 1
        assert pool.connection.call(_metered(number, **limits)) == OverLimit(refused.limit, 1)
        pool.clock.now_ms += 1
        assert pool.connection.call(_metered(number, **limits)) is SubmitOutcome.CREATED
    assert pool.clock.now_ms - 1_700_000_000_000 == 71_000, "the second call went out of the minute"


def test_never_more_than_a_keys_limit_in_any_minute(pool: Pool) -> None:
    times_ms, waited_ms = [], 0
    for number in range(200):
        answer = pool.connection.call(_metered(number, rpm=7))
        if isinstance(answer, OverLimit):
            waited_ms += answer.wait_ms
            pool.clock.now_ms += answer.wait_ms
        else:
            times_ms.append(pool.clock.now_ms)
            pool.clock.now_ms += 37 * number % 2900
    assert waited_ms
    assert len(times_ms) > 100
    assert all(later - earlier > 60_000 for earlier, later in zip(times_ms, times_ms[7:], strict=False))


def test_a_call_of_many_tokens_waits_until_enough_have_gone(pool: Pool) -> None:
    for number, tokens in ((1, 10), (2, 30), (3, 50)):
        assert pool.connection.call(_metered(number, tpm=100, tokens=tokens)) is SubmitOutcome.CREATED
        pool.clock.now_ms += 10_000
    for tokens, wait_s in ((10, 0), (20, 31), (50, 41), (51, 51), (100, 51), (1000, 51)):
        refused = pool.connection.call(_metered(9, tpm=100, tokens=tokens)) if wait_s else None
        assert refused is None or (isinstance(refused, OverLimit) and refused.wait_ms == 1000 * wait_s), tokens


def test_beyond_the_requests_at_once_the_rate_of_ends_says_when_to_come_again(pool: Pool) -> None:
    pool.connection.execute([_hello(FIRST, 1000), LeaseShard(FIRST, 0)])

    def submit(number: int) -> SubmitOutcome | object:
        call = _metered(number)
        assert call.metered is not None
        return pool.connection.call(replace(call, metered=replace(call.metered, max_running=1)))

    for number in range(1, 5):  # each takes 6 s
        assert submit(number) is SubmitOutcome.CREATED
        assert submit(99) == OverLimit(Limit.RUNNING, 0 if number == 1 else 6000)
        pool.clock.now_ms += 6000
        ended = bytes([number]) * 16
        pool.connection.execute([Reject(ended, b"", 0, b"row"), Retire(FIRST, 0, ended, b"result", ttl_ms=60_000)])
        pool.clock.now_ms += 6000 if number == 1 else 0
    assert submit(5) is SubmitOutcome.CREATED
