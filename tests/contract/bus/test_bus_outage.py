"""The server is killed and comes back: nothing acknowledged is lost, every session must show itself again."""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import pytest
from bus_flow import DEAD_MS, LONG_MS, Flow, id_of, submit

from contract.v1.status_pb2 import ServiceStatus
from servicekit.bus import Bus, BusUnavailable
from servicekit.bus.calls import (
    NOT_YET,
    Append,
    Call,
    Claim,
    Commit,
    Compact,
    Hello,
    LeaseShard,
    Leave,
    Length,
    ListSessions,
    Owned,
    Read,
    Renew,
    Revalidate,
    SessionKind,
    SubmitOutcome,
    Take,
)
from servicekit.pool_stats import Loss, PoolStats
from servicekit.session import Recovery, Session, Stopped


class Outage(Protocol):
    bus: Bus
    kill: Callable[[], None]
    start: Callable[[], None]


def _restart(outage: Outage, flow: Flow) -> None:
    outage.kill()
    with pytest.raises(BusUnavailable):
        flow.connection.call(ListSessions())
    with pytest.raises(BusUnavailable):
        flow.connection.reconnect()
    outage.start()
    flow.connection.reconnect()


def _once_settled(flow: Flow, call: Call[Any]) -> Any:
    while (answer := flow.connection.call(call)) is NOT_YET:
        time.sleep(0.01)
    return answer


def _hello(sid: bytes) -> Hello:
    return Hello(sid, SessionKind.SCHEDULER, "s", "", LONG_MS, create=False)


def test_a_restart_keeps_requests_and_functions(outage: Outage) -> None:
    flow = Flow(outage.bus, outage.bus.connect())
    sid = flow.session()
    running, waiting = flow.running(sid), flow.ready()
    flow.connection.call(Commit(sid, ((0, b"row"),), "w", b"plan"))
    log = flow.entries(flow.bus.keys.tokens(0))
    _restart(outage, flow)
    assert flow.entries(flow.bus.keys.tokens(0)) == log
    assert flow.connection.call(submit(waiting)) is SubmitOutcome.EXISTS
    other = flow.session()
    claimed = _once_settled(flow, Claim(other, 10, 0))
    assert [request.request_id for request in claimed] == [waiting]
    assert flow.connection.execute([Revalidate(sid, LONG_MS), Owned(sid)]) == [True, [running]]
    flow.connection.close()


def test_a_new_run_suspends_every_session_until_it_revalidates(outage: Outage) -> None:
    flow = Flow(outage.bus, outage.bus.connect())
    first, second = flow.session(), flow.session()
    _restart(outage, flow)
    greetings = flow.connection.execute([_hello(first), _hello(second)])
    assert [(greeting.new_run, greeting.active) for greeting in greetings] == [(True, False), (False, False)]
    commit = Commit(second, ((0, b"row"),))
    assert flow.connection.execute([commit, Renew(second, LONG_MS), Claim(second, 1, 0)]) == [False, False, None]
    assert flow.connection.execute([Revalidate(second, LONG_MS), commit]) == [True, True]
    assert [info.alive for info in flow.connection.call(ListSessions())] == [False, True]
    flow.connection.close()


def test_a_new_run_drops_shard_leases_and_gives_sessions_their_time_anew(outage: Outage) -> None:
    flow = Flow(outage.bus, outage.bus.connect())
    holder, other, left = flow.session(), flow.session(), flow.session()
    flow.connection.execute([LeaseShard(holder, 0), Leave(left)])
    flow.expire(holder)
    _restart(outage, flow)
    flow.connection.call(_hello(other))
    assert flow.connection.call(Revalidate(other, LONG_MS))
    assert _once_settled(flow, Take(other, holder)) is None, "the outage was not its fault"
    assert flow.connection.call(Revalidate(holder, LONG_MS))
    assert not flow.connection.call(Compact(holder, 0, b"0-1")), "its lease is gone, and nobody else has it yet"
    assert flow.connection.call(LeaseShard(other, 0))
    assert flow.connection.execute([Take(other, left), Revalidate(left, LONG_MS)]) == [[], False]
    flow.connection.close()


def test_a_waiting_reader_learns_of_the_outage(outage: Outage) -> None:
    connection = outage.bus.connect()
    errors: list[Exception] = []

    def wait() -> None:
        try:
            connection.call(Read({outage.bus.keys.key("s"): b"0-0"}, block_ms=60_000))
        except BusUnavailable as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join(0.05)
    outage.kill()
    thread.join()
    assert len(errors) == 1


def test_an_async_connection_reconnects_by_itself(outage: Outage) -> None:
    async def test() -> None:
        stream = outage.bus.keys.key("s")
        connection = await outage.bus.connect_async()
        waiting = asyncio.create_task(connection.call(Read({stream: b"0-0"}, block_ms=60_000)))
        await asyncio.sleep(0.02)
        await asyncio.to_thread(outage.kill)
        with pytest.raises(BusUnavailable):
            await waiting
        with pytest.raises(BusUnavailable):
            await connection.call(Length(stream))
        with pytest.raises(BusUnavailable):
            await outage.bus.connect_async()
        await asyncio.to_thread(outage.start)
        await connection.call(Append(stream, {b"n": b"1"}))
        assert await connection.call(submit(id_of(1))) is SubmitOutcome.CREATED
        await connection.close()

    asyncio.run(test())


def test_an_async_connection_that_nobody_used_meanwhile_tells_of_its_loss_once(outage: Outage) -> None:
    async def test() -> None:
        stream = outage.bus.keys.key("s")
        connection = await outage.bus.connect_async()
        await connection.call(Append(stream, {b"n": b"1"}))
        await asyncio.to_thread(outage.kill)
        await asyncio.to_thread(outage.start)
        with pytest.raises(BusUnavailable):
            await connection.call(Length(stream))
        assert await connection.call(Length(stream)) == 1
        await connection.close()

    asyncio.run(test())


def test_nobody_connects_without_a_server(outage: Outage) -> None:
    outage.kill()
    with pytest.raises(BusUnavailable):
        outage.bus.connect()


# --- Session ----------------------------------------------------------------------------------------------------------


def test_a_session_waits_for_the_bus_and_keeps_what_it_owns(outage: Outage) -> None:
    stats = PoolStats()
    session = Session(outage.bus, SessionKind.SCHEDULER, "s", ttl_ms=LONG_MS, stats=stats)
    assert not stats.is_up
    session.connect()
    assert (stats.is_up, stats.losses) == (True, {})
    sid = session.sid
    outage.kill()
    starter = threading.Timer(0.2, outage.start)
    starter.start()
    assert session.recover(BusUnavailable("killed")) == Recovery(lost=False, new_run=True)
    starter.join()
    assert (stats.is_up, stats.losses) == (True, {Loss.UNREACHABLE: 1, Loss.SUSPENDED: 1})
    assert session.sid == sid
    assert session.connection.call(Commit(sid, ((0, b"row"),)))
    session.leave()
    assert not stats.is_up


def test_a_session_that_does_not_survive_restarts_leaves_what_it_owns(outage: Outage) -> None:
    stats = PoolStats()
    session = Session(outage.bus, SessionKind.SCHEDULER, "s", ttl_ms=LONG_MS, survives_restarts=False, stats=stats)
    session.connect()
    old_sid = session.sid
    flow = Flow(outage.bus, outage.bus.connect())
    request_id = flow.running(old_sid)
    assert session.recover() == Recovery(lost=False, new_run=False)
    assert session.sid == old_sid
    assert stats.losses == {}, "only asked for"
    _restart(outage, flow)
    assert session.recover() == Recovery(lost=True, new_run=True)
    assert stats.losses == {Loss.FENCED: 1}
    assert session.sid != old_sid
    assert not flow.connection.call(Commit(old_sid, ((0, b"row"),)))
    assert _once_settled(flow, Take(session.sid, old_sid)) == [request_id]
    session.leave()
    flow.connection.close()


def test_a_session_that_was_taken_over_begins_anew(outage: Outage) -> None:
    flow = Flow(outage.bus, outage.bus.connect())
    stats = PoolStats()
    session = Session(outage.bus, SessionKind.SCHEDULER, "s", ttl_ms=DEAD_MS, stats=stats)
    session.connect()
    old_sid = session.sid
    request_id = flow.running(old_sid)
    assert flow.connection.call(Take(flow.session(), old_sid)) == [request_id]
    assert not session.connection.call(Commit(session.sid, ((0, b"row"),)))
    assert session.recover() == Recovery(lost=True, new_run=True)
    assert stats.losses == {Loss.FENCED: 1}
    assert session.sid != old_sid
    assert session.connection.call(Owned(session.sid)) == []
    assert session.recover() == Recovery(lost=False, new_run=False)
    session.leave()
    flow.connection.close()


def test_a_session_renews_six_times_before_its_lease_ends(outage: Outage) -> None:
    session = Session(outage.bus, SessionKind.WORKER, "w", ttl_ms=3000)
    session.connect()
    status, draining = ServiceStatus(version="1").SerializeToString(), ServiceStatus(draining=True).SerializeToString()
    renewals = [session.tick(now_s, b"status") for now_s in (100.0, 100.4, 101.0, 101.1, 101.5)]
    renew, bare = Renew(session.sid, 3000, b"status"), Renew(session.sid, 3000)
    assert renewals == [renew, None, renew, None, bare], "a status once a second"
    assert session.tick(102.0, draining) == Renew(session.sid, 3000, draining, draining=True)
    assert session.tick(102.5, draining) == bare
    assert session.tick(103.0, status) == Renew(session.sid, 3000, status, draining=False), (
        "at once if it drains no more"
    )
    assert session.connection.call(renew)
    session.leave()
    with pytest.raises(BusUnavailable):
        session.connection.call(renew)


@pytest.mark.parametrize(("patience_s", "lives"), [(600.0, True), (0.0, False)], ids=["busy", "stuck"])
def test_a_session_outlives_a_busy_loop_but_not_a_stuck_one(outage: Outage, patience_s: float, lives: bool) -> None:
    session = Session(outage.bus, SessionKind.WORKER, "w", ttl_ms=300, patience_s=patience_s)
    session.connect()
    connection = outage.bus.connect()
    began_s = time.monotonic()

    def is_settled() -> bool:
        """Several leases have gone by without a tick and it lives: a short lapse is a machine that is short of time."""
        (listed,) = connection.call(ListSessions())
        return (listed.alive and time.monotonic() - began_s > 1.5) if lives else not listed.alive

    while not is_settled():
        assert time.monotonic() - began_s < 30
        time.sleep(0.02)
    session.leave()
    connection.close()


def test_a_session_that_leaves_is_dead_at_once(outage: Outage) -> None:
    session = Session(outage.bus, SessionKind.WORKER, "w", address="host:1")
    session.connect()
    sid = session.sid
    session.leave()
    session.leave()
    connection = outage.bus.connect()
    (listed,) = connection.call(ListSessions())
    assert (listed.sid, listed.name, listed.address, listed.alive) == (sid, "w", "host:1", False)
    connection.close()


def test_a_session_leaves_a_bus_that_is_away(outage: Outage) -> None:
    session = Session(outage.bus, SessionKind.WORKER, "w")
    session.connect()
    outage.kill()
    session.leave()
    with pytest.raises(BusUnavailable):
        _ = session.connection


def test_a_stopped_session_does_not_wait_for_the_bus(outage: Outage) -> None:
    stop = threading.Event()
    session = Session(outage.bus, SessionKind.WORKER, "w", stop=stop)
    outage.kill()
    timer = threading.Timer(0.1, stop.set)
    timer.start()
    with pytest.raises(Stopped):
        session.connect()
    timer.join()
