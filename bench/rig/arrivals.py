"""Clients of one kind, in a process of their own: they come at a rate, or so many at once, and note what they got.

    python -m bench.rig.arrivals '{"port": 8000, "rate": 20, "seconds": 60, "tokens": 50, "seed": 1, "key": ""}'

With `streams` instead of `rate`, so many clients each send their next request as soon as the last one has ended.
Prints one JSON object for each request: when it was sent (monotonic seconds), its HTTP status, the seconds to its
status line, to its first event and to its end (0: it did not come to that).
"""

import asyncio
import json
import random
import sys
import time
from dataclasses import asdict, dataclass
from typing import cast

import uvloop

PROMPT_TOKENS = 16
END_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Load:
    """The task of a process of clients."""

    port: int
    seconds: float
    tokens: int  # of each reply
    seed: int
    rate: float = 0.0  # requests a second, at random times
    streams: int = 0  # or so many clients at once
    key: str = ""  # API key


@dataclass
class Visit:
    """The outcome of one request; 0: it did not come to that."""

    sent_s: float
    status: int = 0
    answered_s: float = 0.0
    first_s: float = 0.0
    ended_s: float = 0.0


class Stream(asyncio.Protocol):
    """One request on a connection of its own."""

    def __init__(self, visit: Visit, request: bytes) -> None:
        self._visit = visit
        self._request = request
        self._tail = b""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        visit, after_s = self._visit, time.monotonic() - self._visit.sent_s
        joined = self._tail + data
        if not visit.status:
            visit.status, visit.answered_s = int(joined[9:12]), after_s
        if not visit.first_s and b"data: " in joined:
            visit.first_s = after_s
        if visit.status != 200 or joined.endswith(b"0\r\n\r\n"):
            visit.ended_s = after_s
            self._end()
        self._tail = joined[-8:]

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  (what came says what went wrong)
        self._end()

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


class Clients:
    """All clients of a process."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._dice = random.Random(load.seed)
        self._number = load.seed << 20
        self.visits: list[Visit] = []

    async def run(self) -> None:
        """Until the time is over and all have ended."""
        load, until_s = self._load, time.monotonic() + self._load.seconds
        tasks = [asyncio.create_task(self._again_and_again(until_s)) for _ in range(load.streams)]
        while load.rate and time.monotonic() < until_s:
            tasks.append(asyncio.create_task(self._visit()))
            await asyncio.sleep(self._dice.expovariate(load.rate))
        if tasks:
            await asyncio.wait(tasks, timeout=load.seconds + END_TIMEOUT_S)

    async def _again_and_again(self, until_s: float) -> None:
        while time.monotonic() < until_s:
            await self._visit()

    async def _visit(self) -> None:
        request = self._next_request()
        visit = Visit(time.monotonic())
        self.visits.append(visit)
        loop = asyncio.get_running_loop()
        transport, stream = await loop.create_connection(lambda: Stream(visit, request), "127.0.0.1", self._load.port)
        await stream.ended
        transport.close()

    def _next_request(self) -> bytes:
        """Prompts that have nothing in common."""
        self._number += 1
        dice = random.Random(self._number)
        prompt = [dice.randrange(1000) for _ in range(PROMPT_TOKENS)]
        body = json.dumps(
            {"prompt": prompt, "max_tokens": self._load.tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        ).encode()
        key = f"Authorization: Bearer {self._load.key}\r\n" if self._load.key else ""
        head = f"POST /v1/completions HTTP/1.1\r\nHost: bench\r\n{key}Content-Length: {len(body)}\r\n"
        return head.encode() + b"Content-Type: application/json\r\n\r\n" + body


def main() -> None:
    clients = Clients(Load(**json.loads(sys.argv[1])))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(clients.run())
    for visit in clients.visits:
        print(json.dumps(asdict(visit)))


if __name__ == "__main__":
    main()
