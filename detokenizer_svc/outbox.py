"""The calls that the loop writes together with its next read."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import structlog

from contract.domain.request import format_request_id
from detokenizer_svc import wire
from detokenizer_svc.core.effects import Effects, Retirement
from detokenizer_svc.core.textrows import TextRows
from detokenizer_svc.gateways import Gateways
from detokenizer_svc.metrics import ServiceStats
from detokenizer_svc.shard import Shard
from servicekit.bus import keys as k
from servicekit.bus.calls import Append, Call, Cancel, Entry, Retire
from servicekit.bus.dead_letters import dead_letter
from servicekit.bus.keys import Keys
from servicekit.logs import is_debugging

MANY_ENDS = 16  # requests that one call retires: none may keep the server busy for long

_logger = structlog.stdlib.get_logger(__name__)


class TextOutbox:
    """Effects as calls to the bus, in their order; all of them may be sent again."""

    def __init__(
        self,
        names: Keys,
        gateways: Gateways,
        result_ttl_s: float,
        stats: ServiceStats,
        trace_of: Callable[[Retirement], bytes] | None = None,
    ) -> None:
        """Begins empty.

        Args:
            names: the pool's.
            gateways: which of them are there.
            result_ttl_s: for how long results are kept.
            stats: where is counted.
            trace_of: what a collector of traces is told of a request, empty: nothing; None: there is no collector.
        """
        self.calls: list[Call[Any]] = []
        self._ended: deque[tuple[Shard, Retirement]] = deque()  # their last text was put here, their results wait
        self._keys = names
        self._gateways = gateways
        self._result_ttl_ms = int(result_ttl_s * 1000)
        self._stats = stats
        self._trace_of = trace_of

    def put(self, sid: bytes, shard: Shard, effects: Effects) -> None:
        """Put all that rows of a shard's log led to."""
        for route, rows in effects.texts.items():
            self.put_text(sid, route, rows)
        self._put_cancels(effects)
        self.put_ended(shard, effects.retirements)
        if effects.results:
            self.retire(sid)  # so that they are there
            self._put_results(effects)

    def put_whole(self, sid: bytes, shard: Shard, effects: Effects) -> None:
        """The same while a shard is rebuilt: of what has ended all text, of what goes on none yet."""
        self._put_cancels(effects)
        for each in effects.retirements:
            self.put_text(sid, each.route, each.result.rows())
        self.put_ended(shard, effects.retirements)

    def put_text(self, sid: bytes, route: bytes, rows: TextRows) -> None:
        """Put rows for the gateway session `route`, unless nobody is there who would read them."""
        if route and not self._gateways.is_gone(route) and len(rows):
            payload = wire.encode_text(rows, sid, time.time_ns())
            self.calls.append(Append(self._keys.text(route), {k.PAYLOAD: payload}, k.TEXT_CAP))

    @property
    def num_ended(self) -> int:
        """Requests that are to be retired and are not among the calls yet."""
        return len(self._ended)

    def put_ended(self, shard: Shard, retirements: Iterable[Retirement]) -> None:
        """Put requests whose last text was put here. To retire them can wait: their clients have all they want."""
        self._ended.extend((shard, each) for each in retirements)

    def retire(self, sid: bytes, count: int | None = None) -> None:
        """End the first `count` requests that were put here, None: all; some of each gateway together."""
        several: dict[tuple[Shard, bytes], list[Retirement]] = {}
        for _ in range(len(self._ended) if count is None else min(count, len(self._ended))):
            shard, each = self._ended.popleft()
            route = b"" if self._gateways.is_gone(each.route) else each.route
            several.setdefault((shard, route), []).append(each)
        for (shard, route), together in several.items():
            for first in range(0, len(together), MANY_ENDS):
                self.calls.append(self._retire(sid, shard, route, together[first : first + MANY_ENDS]))
        self._stats.num_retired += sum(map(len, several.values()))

    def clear(self) -> None:
        """Do nothing of what was put here."""
        self.calls.clear()
        self._ended.clear()

    def forget(self, shard: Shard) -> None:
        """Retire nothing of a shard: whoever has it now finds in its log who has ended."""
        self._ended = deque(each for each in self._ended if each[0] is not shard)

    def put_letter(self, entry: Entry, stream: str, why: str) -> None:
        """Keep what cannot be read, for the operator."""
        _logger.error("dead letter", stream=stream, entry=entry.entry_id.decode(), why=why)
        self._stats.dead_letters[stream] += 1
        self.calls.append(dead_letter(self._keys, stream, entry.fields, why))

    def drop_text(self) -> None:
        """Drop text for a server that is full: it takes results even then, and text can be asked for again.

        Letters go as well: while they were refused nothing would be read, and nothing would end and make room.
        """
        dropped = [call for call in self.calls if isinstance(call, Append)]
        self.calls = [call for call in self.calls if not isinstance(call, Append)]
        if num_letters := sum(call.stream == self._keys.dead for call in dropped):
            _logger.error("dead letters were not kept", count=num_letters)

    def _put_cancels(self, effects: Effects) -> None:
        """Tell schedulers of sequences that a stop string has ended: they need not go on with them."""
        for cancel in effects.cancels:
            self.calls.append(Cancel(cancel.request_id, int(cancel.reason), time.time_ns(), sequence=cancel.sequence))
            self._stats.num_stop_cancels += 1

    def _retire(self, sid: bytes, shard: Shard, route: bytes, several: Sequence[Retirement]) -> Retire:
        for each in several if is_debugging() else ():
            _logger.debug(
                "retired",
                request_id=format_request_id(each.request_id),
                finish=[sequence.end.reason.name for sequence in each.result.sequences],
                num_tokens=each.result.usage.num_output_tokens,
            )
        for each in several:
            each.result.timeline.retired_ns = time.time_ns()
        (request_id, result), *others = ((each.request_id, wire.encode_finished(each.result)) for each in several)
        usages = (each.result.usage for each in several)
        tokens = tuple(usage.num_prompt_tokens + usage.num_output_tokens for usage in usages)
        traces = tuple(map(self._trace_of, several)) if self._trace_of else ()
        return Retire(sid, shard.number, request_id, result, self._result_ttl_ms, route, tuple(others), tokens, traces)

    def _put_results(self, effects: Effects) -> None:
        """Send gateways that came for the text of an ended request to its result."""
        for route, request_id in effects.results:
            if not self._gateways.is_gone(route):
                self.calls.append(Append(self._keys.text(route), {k.REQUEST: request_id}, k.TEXT_CAP))
