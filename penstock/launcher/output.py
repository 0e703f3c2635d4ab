"""The launcher's output to the terminal: its own lines and those of its children, each with its name in front."""

import os
import sys
from typing import TextIO

_COLORS = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)  # of the terminal's palette
_BOLD = "\x1b[1m"
_PLAIN = "\x1b[0m"


class Output:
    """Lines on standard error, so that standard output holds only what people copy."""

    def __init__(self, *, prefixed: bool = True, stream: TextIO | None = None) -> None:
        """Without prefixes the lines of children go through as they are: for JSON, which names its service itself."""
        self._stream = stream or sys.stderr
        self._prefixed = prefixed
        self._is_heard = True
        self._width = 0
        self._prefixes: dict[str, str] = {}
        self.colored = (self._stream.isatty() or bool(os.environ.get("FORCE_COLOR"))) and "NO_COLOR" not in os.environ

    def introduce(self, name: str) -> None:
        """A child that will have something to say."""
        self._width = max(self._width, len(name))
        self._prefixes[name] = f"\x1b[{_COLORS[len(self._prefixes) % len(_COLORS)]}m"

    def relay(self, name: str, line: str) -> None:
        """A line of a child."""
        if not self._prefixed:
            self._write(line)
            return
        prefix = f"{name:>{self._width}} |"
        self._write(f"{self._prefixes[name]}{prefix}{_PLAIN} {line}" if self.colored else f"{prefix} {line}")

    def say(self, line: str) -> None:
        """A line of the launcher."""
        self._write(f"{_BOLD}{line}{_PLAIN}" if self.colored else line)

    def _write(self, line: str) -> None:
        if not self._is_heard:
            return
        try:
            self._stream.write(line + "\n")
            self._stream.flush()
        except BrokenPipeError:
            # Nobody reads any more; the pipeline goes on without being watched.
            self._is_heard = False
