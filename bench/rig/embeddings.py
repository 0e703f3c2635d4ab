"""A client that asks for vectors over HTTP, a number of them at once, each in a call of its own. One process each.

Speaks as `completions` does: one line of JSON with host, port, bodies and how many at once; "ready"; a line to begin;
one JSON object with when it began and ended and, of each request, when it was sent and answered.
"""

import asyncio
import json
import sys
import time
from typing import Any

import httpx

_JSON = {"content-type": "application/json"}


async def run(asked: dict[str, Any]) -> dict[str, Any]:
    """Serves all requests to their ends."""
    found: list[list[Any]] = []
    at_once = asyncio.Semaphore(asked["at_once"])
    limits = httpx.Limits(max_connections=asked["at_once"], max_keepalive_connections=asked["at_once"])
    url = f"http://{asked['host']}:{asked['port']}"
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=None) as client:
        # Each on a connection of its own, which is kept.
        await asyncio.gather(*(client.get("/health") for _ in range(asked["at_once"])))
        bodies = [json.dumps(body).encode() for body in asked["bodies"]]
        print("ready", flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
        began_s = time.monotonic()
        await asyncio.gather(*(_ask(client, at_once, body, found) for body in bodies))
        return {"began_s": began_s, "ended_s": time.monotonic(), "requests": found}


async def _ask(client: httpx.AsyncClient, at_once: asyncio.Semaphore, body: bytes, found: list[Any]) -> None:
    async with at_once:
        sent_s = time.monotonic()
        reply = await client.post("/v1/embeddings", content=body, headers=_JSON)
        if reply.status_code != 200 or not reply.json()["data"][0]["embedding"]:
            raise ConnectionError(reply.text[:500])
        answered_s = time.monotonic()
        found.append([sent_s, answered_s, answered_s, 1, 0, []])


def main() -> None:
    asked = json.loads(sys.stdin.readline())
    print(json.dumps(asyncio.run(run(asked))), flush=True)


if __name__ == "__main__":
    main()
