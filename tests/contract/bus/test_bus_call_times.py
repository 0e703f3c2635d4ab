"""Times until the server answers are counted by call, and what waits for entries is no slow server."""

import asyncio
import time

import pytest
from bus_flow import LONG_MS, Flow, sid_of

from servicekit.bus import calls as c
from servicekit.bus import open_bus
from servicekit.bus.call_times import BOUNDS_S, SEVERAL, CallTimes

WAIT_MS = 400


def counts(times: CallTimes) -> dict[str, int]:
    return {name: sum(histogram.counts) for name, histogram in times.by_call().items()}


def test_a_call_is_counted_by_its_name(flow: Flow) -> None:
    before = counts(flow.bus.call_times)
    flow.connection.call(c.CountWaiting())
    flow.connection.call(c.ListSessions())
    flow.connection.call(c.ListSessions())
    after = counts(flow.bus.call_times)
    assert after["count_waiting"] == before.get("count_waiting", 0) + 1
    assert after["list_sessions"] == before.get("list_sessions", 0) + 2


def test_several_calls_are_one_exchange(flow: Flow) -> None:
    before = counts(flow.bus.call_times)
    flow.connection.execute([c.CountWaiting(), c.ListSessions()])
    after = counts(flow.bus.call_times)
    assert after.pop(SEVERAL) == before.pop(SEVERAL, 0) + 1
    assert after == before


def test_a_read_that_waits_is_not_counted(flow: Flow) -> None:
    before = counts(flow.bus.call_times)
    began_s = time.monotonic()
    flow.connection.call(c.Read({b"empty": b"0-0"}, block_ms=WAIT_MS))
    assert time.monotonic() - began_s >= WAIT_MS / 1000 / 2
    assert counts(flow.bus.call_times) == before


def test_the_call_before_a_read_that_waits_is_counted_without_the_wait(valkey_url: str) -> None:
    bus = open_bus(valkey_url, "call-times")
    connection = bus.connect()
    connection.call(c.Hello(sid_of(1), c.SessionKind.WORKER, "w", "", LONG_MS))
    # One of several attempts is not held up by a busy machine; with the wait in them, none would be short.
    for _ in range(20):
        connection.execute([c.Renew(sid_of(1), LONG_MS), c.Read({b"empty": b"0-0"}, block_ms=WAIT_MS)])
        renewals = bus.call_times.by_call()["renew"]
        if any(renewals.counts[: BOUNDS_S.index(0.25)]):
            break
    else:
        pytest.fail("the wait is counted")
    connection.close()


def test_a_connection_of_an_event_loop_counts_too(valkey_url: str) -> None:
    async def test() -> None:
        bus = open_bus(valkey_url, "call-times-async")
        connection = await bus.connect_async()
        await connection.call(c.CountWaiting())
        await connection.call(c.Read({b"empty": b"0-0"}, block_ms=1))
        await connection.close()
        assert counts(bus.call_times) == {"count_waiting": 1}

    asyncio.run(test())
