"""A client that costs little: many streamed completions at once, events counted as they come. One process each.

    python -m bench.rig.streams HOST PORT[,PORT...] NUM_STREAMS NUM_TOKENS

Streams take turns with the ports.

Prints one JSON object: the times (monotonic clock, seconds) at which the last stream got its first event and the first
stream got its last one, and how many events had come to all streams at these times.
"""

import asyncio
import json
import sys
import time
from functools import partial
from typing import cast

import uvloop

_EVENT = b"data: "


class Stream(asyncio.Protocol):
    """One HTTP request and its events."""

    def __init__(self, meter: "Meter", request: bytes) -> None:
        self._meter = meter
        self._request = request
        self._tail = b""
        self._num_events = 0
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        joined = self._tail + data
        num_events = joined.count(_EVENT)
        self._tail = joined[-(len(_EVENT) - 1) :]
        if num_events:
            self._meter.add(num_events, is_first=self._num_events == 0)
            self._num_events += num_events
        if joined.endswith(b"0\r\n\r\n") and not self.ended.done():
            self._meter.end()
            self.ended.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_exception(exc or ConnectionError("the server closed a stream before its end"))


class Meter:
    """Events of all streams, and the window in which all were being served."""

    def __init__(self, num_streams: int) -> None:
        self._num_silent = num_streams
        self._num_events = 0
        self.window: dict[str, float] = {}

    def add(self, num_events: int, *, is_first: bool) -> None:
        self._num_events += num_events
        if is_first:
            self._num_silent -= 1
            if self._num_silent == 0:
                self.window |= {"begin_s": time.monotonic(), "begin_events": self._num_events}

    def end(self) -> None:
        if "end_s" not in self.window:
            self.window |= {"end_s": time.monotonic(), "end_events": self._num_events}


def completion_prompt(number: int) -> list[int]:
    """16 tokens that no other prompt begins with."""
    return [number // 64 % 8192, number % 64, *range(14)]


def completion_request(number: int, num_tokens: int) -> bytes:
    """An HTTP request for a streamed completion."""
    prompt = completion_prompt(number)
    body = json.dumps(
        {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"Content-Type: application/json\r\n\r\n" + body


async def run(host: str, ports: list[int], num_streams: int, num_tokens: int) -> dict[str, float]:
    """Serves all streams to their ends."""
    loop = asyncio.get_running_loop()
    meter = Meter(num_streams)
    streams = []
    for number in range(num_streams):
        make = partial(Stream, meter, completion_request(number, num_tokens))
        transport, stream = await loop.create_connection(make, host, ports[number % len(ports)])
        streams.append((transport, stream))
    await asyncio.gather(*(stream.ended for _, stream in streams))
    for transport, _ in streams:
        transport.close()
    return meter.window


def main() -> None:
    host, ports = sys.argv[1], [int(port) for port in sys.argv[2].split(",")]
    num_streams, num_tokens = map(int, sys.argv[3:5])
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(json.dumps(runner.run(run(host, ports, num_streams, num_tokens))))


if __name__ == "__main__":
    main()
