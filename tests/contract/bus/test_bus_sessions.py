"""Sessions: who is alive, who is fenced, and what becomes of what they held."""

import time

import pytest
from bus_flow import DEAD_MS, LONG_MS, Flow, sid_of

from servicekit.bus.calls import (
    NOT_YET,
    Claim,
    Commit,
    Greeting,
    Hello,
    LeaseShard,
    Leave,
    ListSessions,
    ListWorkers,
    Load,
    Owned,
    Pair,
    RegisterWorker,
    Renew,
    Revalidate,
    SessionInfo,
    SessionKind,
    Take,
)


def test_hello_creates_a_session_and_a_second_hello_renews_it(flow: Flow) -> None:
    hello = Hello(sid_of(1), SessionKind.WORKER, "w", "host:1", LONG_MS)
    first, second = flow.connection.execute([hello, hello])
    assert first.active
    assert second.active
    assert not first.new_run
    assert not second.new_run
    assert flow.connection.call(ListSessions()) == [
        SessionInfo(sid_of(1), SessionKind.WORKER, "w", "host:1", alive=True, num_owned=0, status=b"")
    ]


def test_hello_without_create_does_not_raise_the_dead(flow: Flow) -> None:
    hello = Hello(sid_of(1), SessionKind.WORKER, "w", "", LONG_MS, create=False)
    assert not flow.connection.call(hello).active
    assert flow.connection.call(ListSessions()) == []
    assert not flow.connection.call(Revalidate(sid_of(1), LONG_MS))


def test_hello_renews_an_expired_session_that_nobody_took(flow: Flow) -> None:
    sid = flow.session(ttl_ms=DEAD_MS)
    assert not flow.connection.call(ListSessions())[0].alive
    assert flow.connection.call(Hello(sid, SessionKind.SCHEDULER, "s", "", LONG_MS, create=False)).active
    assert flow.connection.call(ListSessions())[0].alive


def test_renew_extends_and_stores_the_status(flow: Flow) -> None:
    sid = flow.session(ttl_ms=DEAD_MS)
    assert flow.connection.call(Renew(sid, LONG_MS, b"\x00status"))
    assert flow.connection.call(Renew(sid, LONG_MS))
    (listed,) = flow.connection.call(ListSessions())
    assert listed.alive
    assert listed.status == b"\x00status"


def test_renew_of_an_unknown_session_is_refused_and_creates_nothing(flow: Flow) -> None:
    assert not flow.connection.call(Renew(sid_of(9), LONG_MS, b"status"))
    assert flow.connection.call(ListSessions()) == []


def test_an_expired_session_that_nobody_took_goes_on(flow: Flow) -> None:
    sid = flow.session()
    request_id = flow.running(sid)
    flow.expire(sid)
    assert flow.connection.call(Commit(sid, ((0, b"row"),)))
    assert flow.connection.call(Owned(sid)) == [request_id]


def test_take_waits_for_the_lease_then_moves_requests_and_frees_workers(flow: Flow) -> None:
    dead, living = flow.session(), flow.session()
    worker = flow.session(SessionKind.WORKER)
    first, second = flow.running(dead), flow.running(dead, shard=3)
    own = flow.running(living)
    flow.connection.call(RegisterWorker(worker, "w", b"info"))
    assert flow.connection.call(Pair(dead, "w"))
    assert flow.connection.call(Take(living, dead)) is None
    assert flow.connection.call(Owned(dead)) == sorted([first, second])

    flow.expire(dead)
    assert flow.connection.call(Take(living, dead)) == sorted([first, second])
    assert flow.connection.call(Owned(living)) == sorted([first, second, own])
    assert flow.connection.call(ListWorkers())[0].owner is None
    loaded = flow.connection.call(Load(living, (first, second, own)))
    assert loaded is not None
    assert [request.strikes for request in loaded.requests] == [0, 0, 0]
    assert [info.sid for info in flow.connection.call(ListSessions())] == [living, worker]


def test_take_twice_moves_once(flow: Flow) -> None:
    dead, living = flow.session(), flow.session()
    request_id = flow.running(dead)
    flow.expire(dead)
    assert flow.connection.call(Take(living, dead)) == [request_id]
    assert flow.connection.call(Take(living, dead)) == []
    assert flow.connection.call(Owned(living)) == [request_id]


def test_of_two_takers_one_gets_everything(flow: Flow) -> None:
    dead, first, second = flow.session(), flow.session(), flow.session()
    request_id = flow.running(dead)
    flow.expire(dead)
    assert flow.connection.call(Take(first, dead)) == [request_id]
    assert flow.connection.call(Take(second, dead)) == []


def test_a_session_cannot_take_itself(flow: Flow) -> None:
    sid = flow.session()
    request_id = flow.running(sid)
    flow.expire(sid)
    assert flow.connection.call(Take(sid, sid)) is None
    assert flow.connection.call(Owned(sid)) == [request_id]


def test_a_taken_session_is_fenced_everywhere_and_writes_nothing(flow: Flow) -> None:
    dead, living = flow.session(), flow.session()
    flow.running(dead)
    waiting = flow.ready()
    flow.expire(dead)
    flow.connection.call(Take(living, dead))
    keys = flow.bus.keys
    log = flow.entries(keys.tokens(0))
    answers = flow.connection.execute(
        [
            Commit(dead, ((0, b"row"),), "w", b"plan"),
            Claim(dead, 1, 0),
            Take(dead, living),
            Load(dead, (waiting,)),
            Owned(dead),
            Renew(dead, LONG_MS),
            Revalidate(dead, LONG_MS),
            LeaseShard(dead, 0),
            Pair(dead, "w"),
            RegisterWorker(dead, "w", b"info"),
        ]
    )
    assert answers == [False, None, None, None, None, False, False, False, None, b""]
    assert flow.entries(keys.tokens(0)) == log
    assert flow.entries(keys.steps("w")) == []
    assert len(flow.entries(keys.requests)) == 1
    assert flow.connection.call(ListWorkers()) == []


def test_leave_frees_everything_at_once(flow: Flow) -> None:
    leaving, living = flow.session(), flow.session()
    worker = flow.session(SessionKind.WORKER)
    request_id = flow.running(leaving)
    flow.connection.call(RegisterWorker(worker, "w", b"info"))
    assert flow.connection.call(Pair(leaving, "w"))
    assert flow.connection.call(LeaseShard(leaving, 7))
    flow.connection.execute([Leave(leaving), Leave(leaving)])
    assert flow.connection.call(LeaseShard(living, 7))
    assert flow.connection.call(Pair(living, "w"))
    assert flow.connection.call(Take(living, leaving)) == [request_id]


def test_a_session_that_left_is_fenced(flow: Flow) -> None:
    sid = flow.session()
    flow.connection.call(Leave(sid))
    hello = Hello(sid, SessionKind.SCHEDULER, "s", "", LONG_MS)
    assert flow.connection.execute([Commit(sid, ((0, b"row"),)), Renew(sid, LONG_MS), Revalidate(sid, LONG_MS)]) == [
        False,
        False,
        False,
    ]
    assert not flow.connection.call(hello).active
    assert flow.entries(flow.bus.keys.tokens(0)) == []


def test_who_left_can_be_told_from_who_died(flow: Flow) -> None:
    leaving, dead, living = flow.session(), flow.session(), flow.session()
    flow.connection.call(Leave(leaving))
    flow.expire(dead)
    listed = {info.sid: (info.alive, info.left) for info in flow.connection.call(ListSessions())}
    assert listed == {leaving: (False, True), dead: (False, False), living: (True, False)}


def test_how_long_a_session_has_been_silent_is_told(flow: Flow) -> None:
    renewed, came_back, silent = flow.session(), flow.session(), flow.session()
    # The youngest is silent for longest only if the calls of the others count.
    deadline_s = time.monotonic() + 30
    while True:
        flow.connection.call(Renew(renewed, LONG_MS))
        flow.connection.call(Revalidate(came_back, LONG_MS))
        silent_ms = {info.sid: info.silent_ms for info in flow.connection.call(ListSessions())}
        if silent_ms[renewed] < silent_ms[silent] > silent_ms[came_back]:
            break
        assert time.monotonic() < deadline_s, silent_ms


def test_leave_of_an_unknown_session_does_nothing(flow: Flow) -> None:
    assert flow.connection.call(Leave(sid_of(9))) is None
    assert flow.connection.call(ListSessions()) == []


@pytest.mark.parametrize("kind", list(SessionKind))
def test_sessions_dead_for_a_minute_are_forgotten_unless_they_own_something(flow: Flow, kind: SessionKind) -> None:
    owner, idle, recent = flow.session(), flow.session(kind), flow.session(kind)
    flow.running(owner)
    long_ago_ms = -60_001
    for sid in (owner, idle):
        assert flow.connection.call(Renew(sid, long_ago_ms))
    flow.expire(recent)
    listed = flow.connection.call(ListSessions())
    assert [(info.sid, info.alive, info.num_owned) for info in listed] == [(owner, False, 1), (recent, False, 0)]
    assert not flow.connection.call(Renew(idle, LONG_MS))


def test_a_forgotten_worker_leaves_nothing_behind(flow: Flow) -> None:
    scheduler, worker = flow.session(), flow.session(SessionKind.WORKER)
    keys = flow.bus.keys
    flow.connection.call(RegisterWorker(worker, "w", b"info"))
    flow.connection.call(Commit(scheduler, (), "w", b"plan"))
    flow.connection.call(Renew(worker, -60_001))
    flow.connection.call(ListSessions())
    assert flow.connection.call(ListWorkers()) == []
    assert flow.entries(keys.steps("w")) == []


def test_a_copy_that_is_behind_becomes_another_run_for_who_comes_back_to_it(flow: Flow) -> None:
    gateway, scheduler = flow.session(SessionKind.GATEWAY), flow.session()

    def hello(sid: bytes, kind: SessionKind, term: int) -> Greeting:
        return flow.connection.call(Hello(sid, kind, "name", "", LONG_MS, create=False, term=term))

    first = hello(gateway, SessionKind.GATEWAY, 0)
    assert (first.new_run, first.active) == (False, True)
    # Meanwhile it was with another copy of the pool, which had counted one run more.
    back = hello(gateway, SessionKind.GATEWAY, first.term + 1)
    assert (back.new_run, back.active) == (True, False)
    assert back.term > first.term + 1, "no copy is as far"
    assert flow.connection.call(Claim(scheduler, 1, 0)) is None, "everybody is suspended"
    # Others that were there too, or were not, come back to the same run.
    for term in (first.term, first.term + 1):
        assert hello(scheduler, SessionKind.SCHEDULER, term) == Greeting(new_run=False, active=False)
    assert flow.connection.call(Revalidate(scheduler, LONG_MS))
    assert flow.connection.call(Claim(scheduler, 1, 0)) is NOT_YET, "the pool waits for its gateways"
