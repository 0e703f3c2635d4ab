"""Since when a dead detokenizer's shards have waited."""

from detokenizer_svc.shard_claims import Deaths
from servicekit.bus.calls import SessionInfo, SessionKind


def session(sid: bytes, *, alive: bool = True, left: bool = False, silent_ms: int = 0) -> SessionInfo:
    return SessionInfo(sid, SessionKind.DETOKENIZER, "d", "", alive, 0, b"", left, silent_ms)


def test_one_that_was_there_and_died_has_been_silent_since() -> None:
    deaths = Deaths()
    deaths.note([session(b"a"), session(b"b")], 100.0)
    assert deaths.last_heard_s() is None
    deaths.note([session(b"a"), session(b"b", alive=False, silent_ms=1500)], 101.0)
    deaths.note([session(b"a"), session(b"b", alive=False, silent_ms=1750)], 101.25)
    assert deaths.last_heard_s() == 99.5
    deaths.settle()
    deaths.note([session(b"a"), session(b"b", alive=False, silent_ms=2000)], 101.5)
    assert deaths.last_heard_s() is None


def test_who_left_in_order_or_was_dead_before_is_not_waited_for() -> None:
    deaths = Deaths()
    deaths.note([session(b"a"), session(b"b", alive=False, silent_ms=9000)], 100.0)
    deaths.note([session(b"a", alive=False, left=True), session(b"b", alive=False, silent_ms=9250)], 100.25)
    assert deaths.last_heard_s() is None


def test_a_death_after_which_nothing_was_to_be_taken_is_forgotten() -> None:
    deaths = Deaths()
    deaths.note([session(b"a")], 100.0)
    deaths.note([session(b"a", alive=False, silent_ms=1500)], 101.0)
    deaths.note([], 120.0)
    assert deaths.last_heard_s() is None
