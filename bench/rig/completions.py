"""A client that costs little: streamed completions over HTTP, a number of them at once or each at its time. One
process each.

Reads one line of JSON: host, port, bodies of requests, how many at once, or when each is sent (seconds after the
beginning; null: the next one when one has ended). Says "ready" when it is connected, begins at the next line, and
prints one JSON object: when it began and ended (monotonic clock, seconds), and of each request when it was sent, when
its first and its last event came, how many events came, the tokens that its usage counts, and the gaps between its
events in seconds (none where requests have no times).
"""

import asyncio
import json
import re
import sys
import time
from collections import deque
from functools import partial
from typing import Any, cast

import uvloop

_OK = b"HTTP/1.1 200"
_EVENT = b"data: "
_LAST_CHUNK = b"0\r\n\r\n"
_DONE = b"[DONE]"
_TAIL_BYTES = 1024  # of a stream are kept: the usage stands at its end
_USAGE = re.compile(rb'"completion_tokens": ?(\d+)')


class Connection(asyncio.Protocol):
    """Requests on one connection, one after the other."""

    def __init__(self, waiting: deque[bytes], found: list[list[Any]], *, keeps_gaps: bool = False) -> None:
        self._waiting = waiting
        self._found = found
        self._keeps_gaps = keeps_gaps
        self._gaps_s: list[float] = []
        self._tail = b""
        self._num_events = 0
        self._sent_s = self._first_s = self._last_s = 0.0
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def send_next(self) -> None:
        """Sends the next request, if there is one left."""
        if not self._waiting:
            self.ended.set_result(None)
            return
        self._tail, self._num_events, self._first_s, self._gaps_s = b"", 0, 0.0, []
        self._sent_s = time.monotonic()
        self._transport.write(self._waiting.popleft())

    def data_received(self, data: bytes) -> None:
        # Events are counted where they end: what is kept of the text before is too short to hold a whole one twice.
        overlap = len(_EVENT) - 1
        num_events = (self._tail[-overlap:] + data).count(_EVENT)
        self._tail = (self._tail + data)[-_TAIL_BYTES:]
        if num_events:
            now_s = time.monotonic()
            if self._keeps_gaps and self._num_events:
                self._gaps_s.append(now_s - self._last_s)
            if self._keeps_gaps:
                self._gaps_s += [0.0] * (num_events - 1)
            self._last_s = now_s
            self._first_s = self._first_s or now_s
            self._num_events += num_events
        if self._tail.endswith(_LAST_CHUNK) and _DONE in self._tail:
            usage = _USAGE.findall(self._tail)
            num_tokens = int(usage[-1]) if usage else 0
            # The last two events are the usage and the mark of the end: they come with the last token.
            gaps_s = self._gaps_s[: self._num_events - 3]
            self._found.append([self._sent_s, self._first_s, self._last_s, self._num_events, num_tokens, gaps_s])
            self.send_next()
        elif not self._num_events and len(self._tail) > len(_OK) and not self._tail.startswith(_OK):
            self._fail(ConnectionError(self._tail[:500].decode(errors="replace")))

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(exc or ConnectionError("the server closed a connection"))

    def _fail(self, error: Exception) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)


def encode(body: dict[str, Any]) -> bytes:
    """An HTTP request for a streamed completion that ends with its usage."""
    content = json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(content)}\r\n"
    return head.encode() + b"Content-Type: application/json\r\n\r\n" + content


async def run(asked: dict[str, Any]) -> dict[str, Any]:
    """Serves all requests to their ends."""
    if asked["arrivals_s"] is not None:
        return await _run_at_times(asked)
    loop = asyncio.get_running_loop()
    waiting = deque(encode(body) for body in asked["bodies"])
    found: list[list[Any]] = []
    connections = []
    for _ in range(min(asked["at_once"], len(waiting))):
        _, connection = await loop.create_connection(lambda: Connection(waiting, found), asked["host"], asked["port"])
        connections.append(connection)
    print("ready", flush=True)
    await loop.run_in_executor(None, sys.stdin.readline)
    began_s = time.monotonic()
    for connection in connections:
        connection.send_next()
    await asyncio.gather(*(connection.ended for connection in connections))
    return {"began_s": began_s, "ended_s": time.monotonic(), "requests": found}


async def _run_at_times(asked: dict[str, Any]) -> dict[str, Any]:
    """Each request on a connection of its own, which is there before its time."""
    loop = asyncio.get_running_loop()
    found: list[list[Any]] = []
    ends: list[asyncio.Future[None]] = []
    print("ready", flush=True)
    await loop.run_in_executor(None, sys.stdin.readline)
    began_s = time.monotonic()
    for due_s, body in zip(asked["arrivals_s"], asked["bodies"], strict=True):
        waiting = deque([encode(body)])
        make = partial(Connection, waiting, found, keeps_gaps=True)
        _, connection = await loop.create_connection(make, asked["host"], asked["port"])
        await asyncio.sleep(began_s + due_s - time.monotonic())
        connection.send_next()
        ends.append(connection.ended)
    await asyncio.gather(*ends)
    return {"began_s": began_s, "ended_s": time.monotonic(), "requests": found}


def main() -> None:
    asked = json.loads(sys.stdin.readline())
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(json.dumps(runner.run(run(asked))), flush=True)


if __name__ == "__main__":
    main()
