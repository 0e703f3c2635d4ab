"""Traces of requests that have ended, and the times at which clients had all of them."""

from collections.abc import Callable

import pytest
from bus_flow import AWKWARD, LONG_MS, Flow, sid_of
from memory_bus import MemoryBus

from servicekit.bus import Bus, open_bus
from servicekit.bus import keys as k
from servicekit.bus.calls import (
    CountUntold,
    Delivered,
    LeaseShard,
    Recall,
    Recalled,
    RequestState,
    Retire,
    SessionKind,
)
from servicekit.bus.library import read_library

TRACE = b"trace" + AWKWARD


def _retired(flow: Flow, request_id: bytes, *traces: bytes) -> None:
    detokenizer = flow.session(SessionKind.DETOKENIZER)
    retire = Retire(detokenizer, 0, request_id, b"result", LONG_MS, sid_of(77), traces=traces)
    assert flow.connection.execute([LeaseShard(detokenizer, 0), retire]) == [True, True]


def test_the_first_who_says_that_a_request_was_delivered_counts(flow: Flow) -> None:
    request_id = flow.ended()
    flow.connection.execute([Delivered(((request_id, 5), (request_id, 6))), Delivered(((request_id, 7),))])
    found = flow.connection.call(Recall(request_id, "tenant"))
    assert found == Recalled(RequestState.ENDED, b"", b"result", 5)


def test_a_client_may_have_all_of_a_request_before_that_is_retired(flow: Flow) -> None:
    request_id = flow.running(flow.session())
    flow.connection.call(Delivered(((request_id, 5),)))
    _retired(flow, request_id, TRACE)
    told = [{k.PAYLOAD: TRACE, k.DELIVERED_NS: b""}, {k.PAYLOAD: TRACE, k.DELIVERED_NS: b"5"}]
    assert flow.fields(flow.bus.keys.traces) == told
    found = flow.connection.call(Recall(request_id, "tenant"))
    assert isinstance(found, Recalled)
    assert found.delivered_ns == 5


def test_what_is_delivered_later_is_told_later_and_once(flow: Flow) -> None:
    request_id = flow.running(flow.session())
    _retired(flow, request_id, TRACE)
    assert flow.fields(flow.bus.keys.traces) == [{k.PAYLOAD: TRACE, k.DELIVERED_NS: b""}]
    flow.connection.execute([Delivered(((request_id, 5),)), Delivered(((request_id, 6),))])
    assert flow.fields(flow.bus.keys.traces)[1:] == [{k.PAYLOAD: TRACE, k.DELIVERED_NS: b"5"}]


@pytest.mark.parametrize("traces", [(), (b"",)])
def test_nobody_is_told_of_requests_that_are_retired_without_a_trace(flow: Flow, traces: tuple[bytes, ...]) -> None:
    request_id = flow.running(flow.session())
    _retired(flow, request_id, *traces)
    flow.connection.call(Delivered(((request_id, 5),)))
    assert flow.fields(flow.bus.keys.traces) == []


def test_a_request_that_nobody_knows_leaves_nothing(flow: Flow) -> None:
    flow.connection.call(Delivered(((sid_of(99), 5),)))
    assert flow.connection.call(Recall(sid_of(99), "tenant")) is None
    assert flow.connection.call(CountUntold()) == 0


@pytest.mark.parametrize("kind", ["memory", "valkey"])
def test_a_collector_that_is_away_does_not_fill_the_server(
    kind: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(k, "TRACES_CAP", 2)
    makers: dict[str, Callable[[], Bus]] = {
        "memory": lambda: MemoryBus("full", library=read_library()),
        "valkey": lambda: open_bus(request.getfixturevalue("valkey_url"), "full"),
    }
    bus = makers[kind]()
    connection = bus.connect()
    try:
        flow = Flow(bus, connection)
        ids = [flow.running(flow.session()) for _ in range(2)]
        detokenizer = flow.session(SessionKind.DETOKENIZER)
        flow.connection.call(LeaseShard(detokenizer, 0))
        for request_id in ids:
            retire = Retire(detokenizer, 0, request_id, b"result", LONG_MS, traces=(TRACE,))
            flow.connection.execute([retire, Delivered(((request_id, 5),))])
        assert len(flow.fields(bus.keys.traces)) == 2
        assert connection.call(CountUntold()) == 2
        (found,) = connection.execute([Recall(ids[1], "tenant")])
        assert (found.result, found.delivered_ns) == (b"result", 5)
    finally:
        connection.close()
