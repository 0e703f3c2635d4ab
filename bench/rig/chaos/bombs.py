"""Foreign connections that no client of an API makes: endless headers, and requests of which half is sent."""

import asyncio
import contextlib
from collections import Counter
from dataclasses import dataclass, field
from urllib.parse import urlsplit

HEADER_BYTES = 50_000_000
NUM_HALVES = 100  # of each kind
REPLY_WITHIN_S = 60.0
_CHUNK = b"a" * 65536
_HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n"
_BODY = _HEAD + b'content-type: application/json\r\ncontent-length: 1000\r\n\r\n{"prompt": "'


@dataclass
class Replies:
    """The answers to all of them."""

    statuses: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


async def bomb(http_url: str, name: str, replies: Replies) -> None:
    """Sends one header that is far too large and many halves at once, and waits for what the gateway says to each."""
    address = urlsplit(http_url)
    assert address.hostname
    assert address.port

    async def one(what: str, start: bytes, num_more_bytes: int, wanted: int) -> None:
        status = await _status(str(address.hostname), int(address.port or 0), start, num_more_bytes)
        replies.statuses[status] += 1
        if status != wanted:
            replies.wrong.append(f"{name} answered {what} with {status or 'nothing'}, not {wanted}")

    await asyncio.gather(
        one("a header of 50 MB", _HEAD + b"x-long: ", HEADER_BYTES, 431),
        *(one("half a head", _HEAD, 0, 408) for _ in range(NUM_HALVES)),
        *(one("half a body", _BODY, 0, 408) for _ in range(NUM_HALVES)),
    )


async def _status(host: str, port: int, start: bytes, num_more_bytes: int) -> int:
    """Of the reply; 0: there is none."""
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(REPLY_WITHIN_S):
            reader, writer = await asyncio.open_connection(host, port)
            sending = asyncio.create_task(_send(writer, start, num_more_bytes))
            try:
                words = (await reader.readline()).split()
            finally:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
    except (OSError, TimeoutError):
        return 0
    finally:
        if writer is not None:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
    return int(words[1]) if len(words) > 1 else 0


async def _send(writer: asyncio.StreamWriter, start: bytes, num_more_bytes: int) -> None:
    """As far as the gateway takes it."""
    with contextlib.suppress(OSError):
        writer.write(start)
        for _ in range(num_more_bytes // len(_CHUNK)):
            writer.write(_CHUNK)
            await writer.drain()
