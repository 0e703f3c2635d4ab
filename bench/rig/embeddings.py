"""A client that costs little: vectors over HTTP, a number of them at once, each in a call of its own. One process each.

Speaks as `completions` does: one line of JSON with host, port, bodies and how many at once; "ready"; a line to begin;
one JSON object with when it began and ended and, of each request, when it was sent and answered.
"""

import asyncio
import json
import re
import sys
import time
from collections import deque
from typing import Any

import uvloop

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


async def run(asked: dict[str, Any]) -> dict[str, Any]:
    """Serves all requests to their ends."""
    waiting = deque(encode(body) for body in asked["bodies"])
    found: list[list[Any]] = []
    num_connections = min(asked["at_once"], len(waiting))
    connections = [await asyncio.open_connection(asked["host"], asked["port"]) for _ in range(num_connections)]
    print("ready", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    began_s = time.monotonic()
    await asyncio.gather(*(_ask(reader, writer, waiting, found) for reader, writer in connections))
    ended_s = time.monotonic()
    for _, writer in connections:
        writer.close()
    return {"began_s": began_s, "ended_s": ended_s, "requests": found}


def encode(body: dict[str, Any]) -> bytes:
    """An HTTP request for vectors."""
    content = json.dumps(body).encode()
    head = f"POST /v1/embeddings HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(content)}\r\n"
    return head.encode() + b"Content-Type: application/json\r\n\r\n" + content


async def _ask(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, waiting: deque[bytes], found: list[Any]
) -> None:
    """One request after the other, until none is left."""
    while waiting:
        sent_s = time.monotonic()
        writer.write(waiting.popleft())
        head = await reader.readuntil(b"\r\n\r\n")
        length = _LENGTH.search(head)
        reply = await reader.readexactly(int(length[1])) if length is not None else b""
        answered_s = time.monotonic()
        if not head.startswith(b"HTTP/1.1 200") or b'"embedding":"' not in reply:
            raise ConnectionError((head + reply)[:500].decode(errors="replace"))
        found.append([sent_s, answered_s, answered_s, 1, 0, []])


def main() -> None:
    asked = json.loads(sys.stdin.readline())
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(json.dumps(runner.run(run(asked))), flush=True)


if __name__ == "__main__":
    main()
