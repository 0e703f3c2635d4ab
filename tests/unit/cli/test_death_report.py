"""What the pool is told of a process that has died."""

import asyncio

from memory_bus import MemoryBus

from penstock.launcher.death_report import tell_dead
from penstock.launcher.layout import Child
from servicekit.bus.calls import Hello, ListSessions, SessionKind

CHILD = Child(
    SessionKind.WORKER, "worker-0", (), "127.0.0.1:1", "", "", "127.0.0.1:1", "host-1-worker-0", "", "redis://h"
)


def test_the_leases_of_a_dead_child_end_and_no_others() -> None:
    bus = MemoryBus()
    connection = bus.connect()
    sessions = [
        (b"a" * 16, SessionKind.WORKER, "host-1-worker-0"),
        (b"b" * 16, SessionKind.WORKER, "worker-0"),
        (b"c" * 16, SessionKind.SCHEDULER, "host-1-worker-0"),
    ]
    for sid, kind, name in sessions:
        connection.call(Hello(sid, kind, name, "", 60_000))
    asyncio.run(tell_dead(bus, CHILD))
    listed = {each.sid[:1]: (each.alive, each.left) for each in connection.call(ListSessions())}
    assert listed == {b"a": (False, False), b"b": (True, False), b"c": (True, False)}


def test_a_server_that_is_away_is_told_nothing() -> None:
    bus = MemoryBus()
    bus.stop()
    asyncio.run(tell_dead(bus, CHILD))
