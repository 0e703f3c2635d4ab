"""Requests that have ended are told to a collector of traces, by any detokenizer that has one.

What is to be told lies in the pool from the moment at which a request is retired, until a collector has taken it: who
dies in between is followed by another, which makes the same spans.
"""

import threading
from collections.abc import Sequence
from typing import Any, Protocol

import structlog

from contract.domain.errors import PoisonMessageError
from detokenizer_svc import wire
from detokenizer_svc.core.spans import Span, delivery, spans
from detokenizer_svc.metrics import TracingStats
from servicekit.bus import Bus, BusFull, BusUnavailable, Connection
from servicekit.bus import keys as k
from servicekit.bus.calls import Acknowledge, Call, CountUntold, Entry, Length, ReadGroup, Reclaim
from servicekit.bus.dead_letters import dead_letter
from servicekit.reminder import Reminder

COUNT = 128  # entries in one export
BLOCK_MS = 500
ABANDONED_MS = 30_000  # what another one took so long ago and did not tell, nobody else will
RETRY_S = 1.0
_logger = structlog.stdlib.get_logger(__name__)


class SpanCollector(Protocol):
    """Takes spans."""

    def export(self, spans: Sequence[Span]) -> bool:
        """Return whether they were taken; if not, they may have been all the same."""
        ...

    def close(self) -> None:
        """Gives up an export that is under way."""
        ...


class TraceExporter:
    """A thread with a connection of its own."""

    def __init__(self, bus: Bus, name: str, collector: SpanCollector, stats: TracingStats) -> None:
        """Begins with what a process of this name was given and did not tell."""
        self._bus = bus
        self._consumer = name.encode()
        self._collector = collector
        self._stats = stats
        self._reminder = Reminder()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def stop(self, patience_s: float) -> None:
        """Tells what there is and ends, within `patience_s`; what is left then is told by another."""
        self._stopping.set()
        self._thread.join(patience_s)
        self._collector.close()

    def _run(self) -> None:
        connection: Connection | None = None
        pending = True  # this consumer may have been given entries before, and not told them
        while not (self._stopping.is_set() and connection is None):
            try:
                connection = connection or self._bus.connect()
                num_told = self._turn(connection, pending=pending)
                if not num_told and not pending and self._stopping.is_set():
                    break
                pending = pending and num_told > 0
            except (BusUnavailable, BusFull) as error:
                if self._reminder.is_due():
                    _logger.warning("traces wait for the Redis server: %s", error)
                if connection is not None:
                    connection.close()
                connection, pending = None, True
                self._stopping.wait(RETRY_S)
        if connection is not None:
            connection.close()

    def _turn(self, connection: Connection, *, pending: bool) -> int:
        """Tells the next entries; how many were told: none if this ends before the collector comes back."""
        stream, me = self._bus.keys.traces, self._consumer
        block_ms = 0 if self._stopping.is_set() else BLOCK_MS
        reads: list[Call[list[Entry]]] = [ReadGroup(stream, k.EXPORTERS, me, COUNT, pending=True)]
        if not pending:
            reads = [
                Reclaim(stream, k.EXPORTERS, me, ABANDONED_MS, COUNT),
                ReadGroup(stream, k.EXPORTERS, me, COUNT, block_ms),
            ]
        self._stats.num_waiting, self._stats.num_untold, *found = connection.execute(
            [Length(stream), CountUntold(), *reads]
        )
        entries = [entry for several in found for entry in several]
        return len(entries) if entries and self._tell(connection, entries) else 0

    def _tell(self, connection: Connection, entries: Sequence[Entry]) -> bool:
        told: list[Span] = []
        done: list[Call[Any]] = []
        for entry in entries:
            try:
                told += _spans(entry)
            except PoisonMessageError as error:
                _logger.error("dead letter", stream="traces", why=str(error))  # noqa: TRY400  (nothing failed here)
                self._stats.num_dead_letters += 1
                done.append(dead_letter(self._bus.keys, "traces", entry.fields, str(error)))
            done.append(Acknowledge(self._bus.keys.traces, k.EXPORTERS, entry.entry_id))
        while told and not self._collector.export(told):
            self._stats.num_failures += 1
            if self._reminder.is_due():
                _logger.warning("the collector of traces does not take them; they wait in Redis", spans=len(told))
            if self._stopping.wait(RETRY_S):
                return False  # they stay with this consumer, for who comes back under its name
        self._stats.num_spans += len(told)
        connection.execute(done)
        return True


def _spans(entry: Entry) -> list[Span]:
    trace = wire.decode_trace(entry.fields.get(k.PAYLOAD, b"\xff"))
    delivered_ns = entry.fields.get(k.DELIVERED_NS, b"")
    return [delivery(trace, int(delivered_ns))] if delivered_ns.isdigit() else spans(trace)
