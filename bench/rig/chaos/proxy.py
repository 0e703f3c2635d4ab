"""A way to the server on which a process's connections can become half-open: they stay, and nothing comes any more.

On a Unix socket, since the kernel then says which process has connected.
"""

import asyncio
import contextlib
import socket
import struct
import threading
from pathlib import Path

_CHUNK_BYTES = 1 << 16


class _Passage:
    """One connection of one process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.is_silent = False


class Proxy:
    """Forwards between those who connect to `path` and the server at `target`, on a thread of its own."""

    def __init__(self, path: Path, target: Path) -> None:
        """Listens when this returns."""
        self._path, self._target = path, target
        self._passages: set[_Passage] = set()
        self._loop = asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(asyncio.start_unix_server(self._serve, path))
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """The address that services are told in place of the server's own."""
        return f"unix://{self._path}"

    def go_silent(self, pid: int) -> int:
        """Make the connections half-open that a process has now, and return their number; new ones are as always."""
        found = [each for each in list(self._passages) if each.pid == pid and not each.is_silent]
        for each in found:
            each.is_silent = True
        return len(found)

    def close(self) -> None:
        """Ends the thread, and with it all connections."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        self._server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        passage = _Passage(_peer(writer))
        self._passages.add(passage)
        try:
            with contextlib.suppress(OSError):
                from_server, to_server = await asyncio.open_unix_connection(self._target)
                ways = [
                    asyncio.create_task(_forward(passage, reader, to_server)),
                    asyncio.create_task(_forward(passage, from_server, writer)),
                ]
                try:
                    # Who of a silent pair hangs up is not heard by the other: only the process itself ends it.
                    await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                    if passage.is_silent:
                        await ways[0]
                finally:
                    for way in ways:
                        way.cancel()
                    await asyncio.gather(*ways, return_exceptions=True)
                    to_server.close()
        finally:
            self._passages.discard(passage)
            writer.close()


async def _forward(passage: _Passage, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_CHUNK_BYTES):
            if not passage.is_silent:
                writer.write(data)
                await writer.drain()


def _peer(writer: asyncio.StreamWriter) -> int:
    """The process at the other end."""
    size = struct.calcsize("3i")
    told = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    pid, _, _ = struct.unpack("3i", told)
    return int(pid)
