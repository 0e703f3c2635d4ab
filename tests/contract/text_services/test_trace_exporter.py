"""A collector is told of every request, whoever dies between a request's end and its word that it took it."""

import dataclasses
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from memory_bus import MemoryBus
from text_pipeline import PATIENCE_S

from contract.domain.errors import ErrorCode
from contract.domain.finish import FinishReason, RequestError, Usage
from contract.domain.request import Header
from contract.domain.timeline import Computed, Run, Start, StartReason, Timeline
from detokenizer_svc import wire
from detokenizer_svc.core.spans import Asked, Span, Trace, delivery, spans
from detokenizer_svc.metrics import TracingStats
from detokenizer_svc.tracing import TraceExporter
from servicekit.bus import keys as k
from servicekit.bus.calls import Append, Length, Read, ReadGroup

RUNS = [Run(0, 0, Start(400, StartReason.TAKEN_OVER), Computed("a", b"a" * 16, 4, 500))]
TRACE = Trace(
    Header(b"r" * 16, "t", 0, 100, 0, f"00-{'ab' * 16}-{'cd' * 8}-01", 0),
    Asked("m", is_chat=True, temperature=0.5, max_tokens=7),
    Usage(5, 9, 2),
    Timeline(150, 200, 300, RUNS, 3, finished_ns=900, retired_ns=950),
    (FinishReason.STOP, FinishReason.ERROR),
    RequestError(ErrorCode.INTERNAL, "broken", "x"),
)


class Collector:
    """Takes spans from the moment at which it is there."""

    def __init__(self, *, is_there: bool = True) -> None:
        self.is_there = is_there
        self.was_asked = threading.Event()
        self.found: list[Span] = []
        self.has_found = threading.Condition()

    def export(self, several: Sequence[Span]) -> bool:
        self.was_asked.set()
        if self.is_there:
            with self.has_found:
                self.found += several
                self.has_found.notify_all()
        return self.is_there

    def close(self) -> None:
        pass

    def wait(self, count: int) -> list[Span]:
        with self.has_found:
            assert self.has_found.wait_for(lambda: len(self.found) >= count, PATIENCE_S)
        return self.found


@contextmanager
def exporter(bus: MemoryBus, collector: Collector, name: str = "d") -> Iterator[TracingStats]:
    stats = TracingStats()
    made = TraceExporter(bus, name, collector, stats)
    try:
        yield stats
    finally:
        made.stop(PATIENCE_S)


def _tell(bus: MemoryBus, payload: bytes, delivered_ns: bytes = b"") -> None:
    connection = bus.connect()
    connection.call(Append(bus.keys.traces, {k.PAYLOAD: payload, k.DELIVERED_NS: delivered_ns}))
    connection.close()


def _length(bus: MemoryBus, stream: bytes) -> int:
    connection = bus.connect()
    length = connection.call(Length(stream))
    connection.close()
    return length


@pytest.mark.parametrize("trace", [TRACE, dataclasses.replace(TRACE, asked=Asked(), reasons=(), error=None)])
def test_a_trace_is_read_as_it_was_written(trace: Trace) -> None:
    assert wire.decode_trace(wire.encode_trace(trace)) == trace


def test_requests_and_their_deliveries_are_told_and_wait_no_more() -> None:
    bus, collector, expected = MemoryBus("traces"), Collector(), [*spans(TRACE), delivery(TRACE, 970)]
    with exporter(bus, collector) as stats:
        _tell(bus, wire.encode_trace(TRACE))
        _tell(bus, wire.encode_trace(TRACE), b"970")
        assert collector.wait(len(expected)) == expected
    assert stats.num_spans == len(expected)
    assert _length(bus, bus.keys.traces) == 0


def test_what_a_collector_does_not_take_waits_for_it() -> None:
    bus, collector = MemoryBus("traces"), Collector(is_there=False)
    _tell(bus, wire.encode_trace(TRACE))
    with exporter(bus, collector) as stats:
        assert collector.was_asked.wait(PATIENCE_S)
        assert _length(bus, bus.keys.traces) == 1
        collector.is_there = True
        assert collector.wait(1)
    assert stats.num_failures >= 1
    assert _length(bus, bus.keys.traces) == 0


def test_what_was_read_and_not_told_is_told_by_who_comes_back_under_the_name() -> None:
    bus, absent, collector = MemoryBus("traces"), Collector(is_there=False), Collector()
    _tell(bus, wire.encode_trace(TRACE))
    with exporter(bus, absent):
        assert absent.was_asked.wait(PATIENCE_S)
    with exporter(bus, collector):
        assert collector.wait(1) == spans(TRACE)


def test_what_another_read_long_ago_and_did_not_tell_is_told_by_those_that_live(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("detokenizer_svc.tracing.ABANDONED_MS", 0)
    bus, collector = MemoryBus("traces"), Collector()
    _tell(bus, wire.encode_trace(TRACE))
    connection = bus.connect()
    assert connection.call(ReadGroup(bus.keys.traces, k.EXPORTERS, b"dead", 10))
    with exporter(bus, collector):
        assert collector.wait(1) == spans(TRACE)


def test_what_cannot_be_read_is_kept_for_the_operator_and_holds_nothing_up() -> None:
    bus, collector = MemoryBus("traces"), Collector()
    _tell(bus, b"\xff no record")
    _tell(bus, wire.encode_trace(TRACE))
    with exporter(bus, collector) as stats:
        assert collector.wait(1) == spans(TRACE)
    assert stats.num_dead_letters == 1
    connection = bus.connect()
    ((letter,),) = connection.call(Read({bus.keys.dead: b"0-0"})).values()
    assert letter.fields[k.STREAM] == b"traces"
