"""Surveys tell what has changed, and cost nothing while nothing changes."""

import time
from dataclasses import replace

from bus_flow import DEAD_MS, LONG_MS, Flow, sid_of

from servicekit.bus import Connection
from servicekit.bus.calls import (
    Hello,
    Leave,
    ListSessions,
    ListWorkers,
    Pair,
    RegisterWorker,
    Renew,
    Revalidate,
    SessionKind,
    Survey,
    Take,
    Unpair,
)
from servicekit.bus.keys import GONE_CAP
from servicekit.roster import Roster


def update(roster: Roster, connection: Connection) -> int:
    """Surveys until nothing is left; how many answers had something in them."""
    for number in range(100):
        answer = connection.call(roster.survey())
        if roster.note(answer, time.monotonic()):
            return number + (answer is not None)
    raise AssertionError("no survey was the last")


def agrees(roster: Roster, connection: Connection) -> bool:
    """Return whether it says what lists say, but for statuses and what is owned."""
    sessions, workers = connection.execute([ListSessions(), ListWorkers()])
    listed = [replace(each, num_owned=0, status=b"") for each in sessions]
    return workers == roster.workers() and listed == [
        replace(each, status=b"") for each in roster.sessions(time.monotonic())
    ]


def test_a_survey_tells_what_has_changed_and_nothing_twice(flow: Flow) -> None:
    roster, connection = Roster(), flow.connection
    assert update(roster, connection) == 0
    scheduler, worker = flow.session(), flow.session(SessionKind.WORKER)
    assert update(roster, connection) == 1
    assert connection.call(roster.survey()) is None
    for call in (
        RegisterWorker(worker, "w", b"info"),
        Pair(scheduler, "w"),
        Unpair(scheduler, "w"),
        Hello(worker, SessionKind.WORKER, "another name", "", LONG_MS),
        Renew(worker, LONG_MS, b"status", draining=True),
        Renew(worker, LONG_MS, b"status", draining=False),
        Renew(worker, DEAD_MS),
        Renew(worker, LONG_MS),
        Pair(scheduler, "w"),
        Leave(scheduler),
        Renew(worker, -60_001),
    ):
        connection.call(call)
        assert update(roster, connection) == 1, call
        assert agrees(roster, connection), call
        assert connection.call(roster.survey()) is None
    assert [each.sid for each in roster.sessions(0.0)] == [scheduler]
    assert roster.workers() == []


def test_renewals_and_figures_are_no_changes(flow: Flow) -> None:
    roster, sid = Roster(), flow.session()
    update(roster, flow.connection)
    flow.connection.call(Renew(sid, LONG_MS, b"first"))
    assert update(roster, flow.connection) == 1
    assert [each.status for each in roster.sessions(0.0)] == [b"first"], "what does not change later is known by it"
    flow.connection.execute([Renew(sid, LONG_MS), Renew(sid, LONG_MS, b"figures"), Renew(sid, LONG_MS, b"others")])
    assert flow.connection.call(roster.survey()) is None


def test_the_status_of_one_that_begins_to_drain_is_told(flow: Flow) -> None:
    roster, sid = Roster(), flow.session()
    update(roster, flow.connection)
    flow.connection.call(Renew(sid, LONG_MS, b"draining", draining=True))
    flow.connection.call(Renew(sid, LONG_MS))
    update(roster, flow.connection)
    assert [each.status for each in roster.sessions(0.0)] == [b"draining"]


def test_many_changes_come_in_parts(flow: Flow) -> None:
    roster = Roster()
    for _ in range(150):
        flow.session()
    answers = update(roster, flow.connection)
    assert answers == 19
    assert len(roster.sessions(0.0)) == 150
    assert agrees(roster, flow.connection)


def test_a_session_that_was_taken_is_gone(flow: Flow) -> None:
    roster, dead, living = Roster(), flow.session(), flow.session()
    update(roster, flow.connection)
    flow.expire(dead)
    flow.connection.call(Take(living, dead))
    update(roster, flow.connection)
    assert [each.sid for each in roster.sessions(0.0)] == [living]


def test_who_was_away_for_very_long_is_told_everything(flow: Flow) -> None:
    roster, early = Roster(), flow.session()
    update(roster, flow.connection)
    flow.connection.call(Renew(early, -60_001))
    update(Roster(), flow.connection)
    for number in range(GONE_CAP + 10):
        sid = sid_of(0)[:8] + number.to_bytes(8, "big")
        hello = Hello(sid, SessionKind.WORKER, "w", "", LONG_MS)
        flow.connection.execute([hello, Renew(sid, -60_001), Survey(1 << 40, 1)])
    update(roster, flow.connection)
    assert agrees(roster, flow.connection)
    assert roster.sessions(0.0) == []


def test_silence_grows_while_nothing_is_told(flow: Flow) -> None:
    roster, sid = Roster(), flow.session()
    flow.connection.call(Renew(sid, DEAD_MS))
    update(roster, flow.connection)
    now_s = time.monotonic()
    (later,) = roster.sessions(now_s + 10)
    assert 10_000 <= later.silent_ms < 100_000


def test_a_roster_that_forgets_begins_anew(flow: Flow) -> None:
    roster = Roster()
    flow.session()
    update(roster, flow.connection)
    roster.forget()
    assert roster.sessions(0.0) == []
    update(roster, flow.connection)
    assert agrees(roster, flow.connection)


def test_a_lease_that_is_cut_short_is_told_whatever_it_was_before(flow: Flow) -> None:
    roster, connection = Roster(), flow.connection
    connection.call(Hello(sid_of(1), SessionKind.GATEWAY, "g", "", DEAD_MS))
    connection.call(Revalidate(sid_of(1), LONG_MS))
    update(roster, connection)
    assert [each.alive for each in roster.sessions(0.0)] == [True]
    connection.call(Renew(sid_of(1), DEAD_MS))
    update(roster, connection)
    assert [each.alive for each in roster.sessions(0.0)] == [False]
