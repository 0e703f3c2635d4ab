"""The server's append-only file, and how it loses its last writes, as after a failure of the host.

A kill alone loses nothing: what the server has acknowledged, the operating system has. So the server is stopped, the
end of its file is cut off between two commands, and only then is it killed.
"""

import asyncio
import os
import re
import signal
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_WATCH_S = 0.05
_LONGEST_S = 5.0  # that can be cut off


@dataclass(frozen=True)
class Cut:
    """The writes that a server has lost."""

    num_units: int  # commands, or functions with all they did
    num_bytes: int


class AppendOnlyFile:
    """The file that the server writes at present, below its data directory."""

    def __init__(self, data_dir: Path) -> None:
        self._folder = data_dir / "appendonlydir"
        self._sizes: deque[tuple[float, Path, int]] = deque()  # when, which file, how long

    async def watch(self) -> None:
        """Remembers for ever how long the file was when."""
        while True:
            self._note()
            await asyncio.sleep(_WATCH_S)

    def _note(self) -> None:
        now_s, path = time.monotonic(), self.path()
        self._sizes.append((now_s, path, path.stat().st_size))
        while self._sizes[0][0] < now_s - _LONGEST_S:
            self._sizes.popleft()

    def path(self) -> Path:
        """Of the last file of the manifest: the one that grows."""
        manifest = next(self._folder.glob("*.manifest"))
        *_, last = re.findall(r"^file (\S+) seq \d+ type i", manifest.read_text(), re.MULTILINE)
        return self._folder.joinpath(last)

    def lose(self, pid: int, lost_s: float) -> Cut:
        """Kills the server, which loses what it wrote within about the last `lost_s` seconds."""
        os.kill(pid, signal.SIGSTOP)
        try:
            path = self.path()
            self._note()
            since_s = time.monotonic() - lost_s
            sizes = [(at_s, size) for at_s, noted, size in self._sizes if noted == path]
            return cut(path, max([size for at_s, size in sizes if at_s <= since_s], default=sizes[0][1]))
        finally:
            os.kill(pid, signal.SIGKILL)


def cut(path: Path, keep_bytes: int) -> Cut:
    """Cuts a file off at the first border between two units that lies at or after `keep_bytes`."""
    data = path.read_bytes()
    ends = list(borders(data))
    kept = next((end for end in ends if end >= keep_bytes), len(data))
    os.truncate(path, kept)
    return Cut(sum(end > kept for end in ends), len(data) - kept)


def borders(data: bytes) -> Iterator[int]:
    """The ends of units: a command alone, or all from MULTI to EXEC, which is what a function leaves."""
    position, is_open = 0, False
    while position < len(data):
        if data[position : position + 1] == b"#":  # a remark, for instance of the time
            position = data.find(b"\n", position) + 1 or len(data)
        else:
            name, position = _command(data, position)
            if position > len(data):  # the last command is not whole
                return
            if name in (b"MULTI", b"EXEC"):
                is_open = name == b"MULTI"
        if not is_open:
            yield position


def _command(data: bytes, position: int) -> tuple[bytes, int]:
    """The name of the command that begins at `position`, and where it ends; after the data if it is not whole."""
    nowhere = len(data) + 1
    name = b""
    header_end = data.find(b"\r\n", position)
    if header_end < 0:
        return name, nowhere
    num_words, position = int(data[position + 1 : header_end]), header_end + 2
    for _ in range(num_words):
        header_end = data.find(b"\r\n", position)
        if header_end < 0:
            return name, nowhere
        num_bytes, begin = int(data[position + 1 : header_end]), header_end + 2
        position = begin + num_bytes + 2
        name = name or data[begin : begin + num_bytes].upper()
    return name, position
