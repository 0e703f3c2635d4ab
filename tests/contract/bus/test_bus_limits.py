"""API keys with limits: calls and tokens of a minute, and requests that have not ended."""

from dataclasses import replace

import pytest
from bus_flow import LONG_MS, Flow, id_of, submit

from servicekit.bus.calls import (
    Bounds,
    Claim,
    LeaseShard,
    Limit,
    Metered,
    OverLimit,
    Overload,
    Reject,
    Retire,
    SessionKind,
    Submit,
    SubmitOutcome,
    Tokenized,
)
from servicekit.bus.keys import REQUEST

KEY, OTHER = b"key-1234", b"key-5678"
CREATED, EXISTS = SubmitOutcome.CREATED, SubmitOutcome.EXISTS
MINUTE_MS = 61_000


def asking(number: int, key: bytes = KEY, *, tokens: int = 0, num_tokens: int = 0, **limits: int) -> Submit:
    """A call of one request."""
    metered = Metered(key, id_of(number), tokens=tokens, call_tokens=tokens, **limits)
    return replace(submit(id_of(number), num_tokens=num_tokens), metered=metered)


def end(flow: Flow, detokenizer: bytes, number: int, *tokens: int) -> bool:
    """A request that waits for its tokens ends, having used so many."""
    flow.connection.call(LeaseShard(detokenizer, 0))
    flow.connection.call(Reject(id_of(number), b"", 0, b"row"))
    return flow.connection.call(Retire(detokenizer, 0, id_of(number), b"result", LONG_MS, tokens=tokens))


@pytest.fixture
def detokenizer(flow: Flow) -> bytes:
    return flow.session(SessionKind.DETOKENIZER)


def test_a_key_may_call_so_often_in_a_minute_and_is_told_when_again(flow: Flow) -> None:
    call = flow.connection.call
    assert [call(asking(number, rpm=2)) for number in (1, 2)] == [CREATED, CREATED]
    refused = call(asking(3, rpm=2))
    assert isinstance(refused, OverLimit)
    assert refused.limit is Limit.CALLS
    assert MINUTE_MS - 10_000 < refused.wait_ms <= MINUTE_MS
    assert call(asking(3, OTHER, rpm=2)) is CREATED, "a key's calls are its own"
    assert call(submit(id_of(4))) is CREATED, "who has no limits is not counted"
    assert call(asking(5, rpm=3)) is CREATED, "who was refused was not counted"


def test_what_is_sent_again_counts_once(flow: Flow) -> None:
    call = flow.connection.call
    for _ in range(3):
        assert call(asking(1, rpm=2, max_running=1, tpm=10, tokens=5)) in (CREATED, EXISTS)
    assert call(asking(2, rpm=2, tpm=10, tokens=5)) is CREATED
    assert isinstance(call(asking(3, tpm=10, tokens=1)), OverLimit)


def test_a_key_may_have_so_many_requests_that_have_not_ended(flow: Flow, detokenizer: bytes) -> None:
    call = flow.connection.call
    assert [call(asking(number, max_running=2)) for number in (1, 2)] == [CREATED, CREATED]
    assert call(asking(3, max_running=2)) == OverLimit(Limit.RUNNING, 0)
    assert end(flow, detokenizer, 1)
    assert not end(flow, detokenizer, 1), "an end counts once"
    assert call(asking(3, max_running=2)) is CREATED
    refused = call(asking(4, max_running=2))
    assert isinstance(refused, OverLimit)
    assert refused.limit is Limit.RUNNING
    assert 0 <= refused.wait_ms < 60_000, "one ended a moment ago"


def test_tokens_count_as_granted_until_it_is_known_what_was_used(flow: Flow, detokenizer: bytes) -> None:
    call = flow.connection.call
    assert call(asking(1, tpm=100, tokens=90, num_tokens=10)) is CREATED
    refused = call(asking(2, tpm=100, tokens=11))
    assert isinstance(refused, OverLimit)
    assert refused.limit is Limit.TOKENS
    assert MINUTE_MS - 10_000 < refused.wait_ms <= MINUTE_MS
    (hint,) = flow.hints()
    assert hint.fields[REQUEST] == id_of(1)
    assert call(Tokenized(id_of(1), hint.entry_id, b"meta", 1, 9)), "a token less than it seemed"
    assert call(asking(2, tpm=100, tokens=11)) is CREATED
    assert isinstance(call(asking(3, tpm=100, tokens=1)), OverLimit)
    assert end(flow, detokenizer, 2, 1)
    assert call(asking(3, tpm=100, tokens=10)) is CREATED
    assert end(flow, detokenizer, 3, 30), "more than was granted counts too"
    assert isinstance(call(asking(4, tpm=120, tokens=1)), OverLimit)
    assert call(asking(4, tpm=121, tokens=1)) is CREATED


def test_a_call_of_more_tokens_than_the_limit_is_let_in_when_nothing_was_used(flow: Flow, detokenizer: bytes) -> None:
    call = flow.connection.call
    assert call(asking(1, tpm=10, tokens=50)) is CREATED
    assert isinstance(call(asking(2, tpm=10, tokens=50)), OverLimit)
    assert end(flow, detokenizer, 1, 0)
    assert call(asking(2, tpm=10, tokens=50)) is CREATED


def several(flow: Flow, first: int, count: int, **limits: int) -> list[object]:
    """A call of several requests, of five tokens each."""
    metered = Metered(KEY, id_of(first), tokens=5, call_tokens=5 * count, call_requests=count, **limits)
    calls = [replace(submit(id_of(number)), metered=metered) for number in range(first, first + count)]
    return flow.connection.execute(calls)


def test_the_first_request_of_a_call_stands_for_all_of_it(flow: Flow, detokenizer: bytes) -> None:
    assert several(flow, 1, 3, rpm=1, tpm=15, max_running=3) == [CREATED] * 3
    for limits in ({"rpm": 1}, {"tpm": 15}, {"max_running": 4}):
        assert all(isinstance(each, OverLimit) for each in several(flow, 11, 2, **limits)), limits
    assert several(flow, 1, 3, rpm=1, tpm=15, max_running=3) == [EXISTS] * 3
    for number in (1, 2, 3):
        assert end(flow, detokenizer, number, 2)
    assert several(flow, 11, 2, rpm=2, tpm=16, max_running=2) == [CREATED] * 2


def test_who_waits_beyond_the_pools_bounds_was_not_counted(flow: Flow) -> None:
    call = flow.connection.call
    assert call(submit(id_of(1))) is CREATED
    refused = replace(asking(2, rpm=1, max_running=1, tpm=1, tokens=1), bounds=Bounds(requests=1))
    assert isinstance(call(refused), Overload)
    assert call(asking(3, rpm=1, max_running=1, tpm=1, tokens=1)) is CREATED


def test_what_a_restarted_server_had_lost_runs_again_and_counts_for_nothing_else(flow: Flow) -> None:
    call = flow.connection.call
    again = replace(asking(1, rpm=1, tpm=5, max_running=1, tokens=5), witness=(b"",))
    assert call(again) is CREATED
    assert call(asking(2, max_running=1)) == OverLimit(Limit.RUNNING, 0)
    assert call(asking(2, rpm=1, tpm=5, tokens=5)) is CREATED
    beyond = replace(asking(3, rpm=1, tpm=5, max_running=1, tokens=5), witness=(b"",))
    assert call(beyond) is CREATED, "it was accepted before"


def test_limits_hold_after_a_death_of_who_holds_the_request(flow: Flow, detokenizer: bytes) -> None:
    call = flow.connection.call
    scheduler = flow.session()
    assert call(asking(1, max_running=1)) is CREATED
    (hint,) = flow.hints()
    assert call(Tokenized(id_of(1), hint.entry_id, b"meta", 1))
    assert call(Claim(scheduler, 1, 0))
    flow.expire(scheduler)
    assert call(asking(2, max_running=1)) == OverLimit(Limit.RUNNING, 0)
    call(LeaseShard(detokenizer, 0))
    assert call(Retire(detokenizer, 0, id_of(1), b"result", LONG_MS, tokens=(7,)))
    assert call(asking(2, max_running=1)) is CREATED
