"""What the loop writes together with its next read."""

import time
from collections.abc import Iterable, Sequence
from typing import Any

import structlog

from detokenizer_svc import wire
from detokenizer_svc.core.detokenizer import Effects, Retirement
from detokenizer_svc.core.textrows import TextRows
from detokenizer_svc.gateways import Gateways
from detokenizer_svc.metrics import ServiceStats
from detokenizer_svc.shard import Shard
from penstock.domain.request import format_request_id
from servicekit.bus import keys as k
from servicekit.bus.calls import Append, Call, Cancel, Entry, Retire
from servicekit.bus.dead_letters import dead_letter
from servicekit.bus.keys import Keys
from servicekit.logs import is_debugging

_logger = structlog.stdlib.get_logger(__name__)


class Outbox:
    """Effects as calls to the bus, in their order; all of them may be sent again."""

    def __init__(self, names: Keys, gateways: Gateways, result_ttl_s: float, stats: ServiceStats) -> None:
        self.calls: list[Call[Any]] = []
        self._keys = names
        self._gateways = gateways
        self._result_ttl_ms = int(result_ttl_s * 1000)
        self._stats = stats

    def put_text(self, sid: bytes, route: bytes, rows: TextRows) -> None:
        """Rows for the gateway session `route`, unless nobody is there who would read them."""
        if route and not self._gateways.is_gone(route) and len(rows):
            payload = wire.encode_text(rows, sid, time.time_ns())
            self.calls.append(Append(self._keys.text(route), {k.PAYLOAD: payload}, k.TEXT_CAP))

    def put_cancels(self, effects: Effects) -> None:
        """The schedulers need not go on with sequences that a stop string has ended."""
        for cancel in effects.cancels:
            self.calls.append(Cancel(cancel.request_id, int(cancel.reason), time.time_ns(), sequence=cancel.sequence))
            self._stats.num_stop_cancels += 1

    def put_retirements(self, sid: bytes, shard: Shard, retirements: Iterable[Retirement]) -> None:
        """Ends requests whose last text was put here before, those of each gateway together."""
        by_route: dict[bytes, list[Retirement]] = {}
        for each in retirements:
            route = b"" if self._gateways.is_gone(each.route) else each.route
            by_route.setdefault(route, []).append(each)
        for route, several in by_route.items():
            self.calls.append(self._retire(sid, shard, route, several))
        self._stats.num_retired += sum(map(len, by_route.values()))

    def _retire(self, sid: bytes, shard: Shard, route: bytes, several: Sequence[Retirement]) -> Retire:
        for each in several if is_debugging() else ():
            _logger.debug(
                "retired",
                request_id=format_request_id(each.request_id),
                finish=[sequence.end.reason.name for sequence in each.result.sequences],
                num_tokens=each.result.usage.num_output_tokens,
            )
        (request_id, result), *others = ((each.request_id, wire.encode_finished(each.result)) for each in several)
        return Retire(sid, shard.number, request_id, result, self._result_ttl_ms, route, tuple(others))

    def put_results(self, effects: Effects) -> None:
        """Gateways that came for text when it had gone to another call find it in the result."""
        for route, request_id in effects.results:
            self.calls.append(Append(self._keys.text(route), {k.REQUEST: request_id}, k.TEXT_CAP))

    def put_letter(self, entry: Entry, stream: str, why: str) -> None:
        """Keeps what cannot be read, for the operator."""
        _logger.error("dead letter", stream=stream, entry=entry.entry_id.decode(), why=why)
        self._stats.dead_letters[stream] += 1
        self.calls.append(dead_letter(self._keys, stream, entry.fields, why))

    def drop_text(self) -> None:
        """For a server that is full: it takes results even then, and text can be asked for again.

        Letters go as well: while they were refused nothing would be read, and nothing would end and make room.
        """
        dropped = [call for call in self.calls if isinstance(call, Append)]
        self.calls = [call for call in self.calls if not isinstance(call, Append)]
        if num_letters := sum(call.stream == self._keys.dead for call in dropped):
            _logger.error("dead letters were not kept", count=num_letters)
