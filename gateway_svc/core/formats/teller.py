"""The base of all readers of outputs: holds text back until it is known, and tells it in pieces."""

import re
from collections.abc import Callable, Iterable

from gateway_svc.core.formats.pieces import Kind, Piece

SPACE = " \t\r\n"


class Teller:
    """One output. Text that may turn out to be the beginning of a mark is held back until it is known."""

    __slots__ = ("_held", "_is_last", "_pieces", "_step", "at")

    def __init__(self, step: Callable[[], bool]) -> None:
        """`step` reads on in the text that is held; false: more is needed, or there is nothing left."""
        self._held = ""  # text that is not told so far, from `at` on
        self._pieces: list[Piece] = []
        self._is_last = False
        self._step = step
        self.at = 0  # characters of the raw text up to which all was told

    @property
    def thoughts(self) -> tuple[bool, ...]:
        """Of each stretch of the output up to a mark that closes thoughts, and of the last: it is one."""
        raise NotImplementedError

    def feed(self, text: str) -> list[Piece]:
        """The pieces that more of the raw text brings."""
        self._held += text
        return self._run()

    def end(self) -> list[Piece]:
        """The pieces that were held back; nothing comes after them."""
        self._is_last = True
        return self._run()

    def _run(self) -> list[Piece]:
        while self._step():
            pass
        pieces, self._pieces = self._pieces, []
        return pieces

    def _tell(self, kind: Kind, size: int) -> None:
        """Tell the next `size` characters as they are."""
        if size:
            self._pieces.append(Piece(kind, self._held[:size], self.at, self.at + size))
            self._drop(size)

    def _tell_whole(self, kind: Kind, text: str, size: int) -> None:
        """Tell what the next `size` characters mean."""
        self._pieces.append(Piece(kind, text, self.at, self.at + size, is_plain=False))
        self._drop(size)

    def _drop(self, size: int) -> None:
        self._held = self._held[size:]
        self.at += size


def any_of(marks: Iterable[str]) -> re.Pattern[str]:
    """The expression of any of some marks."""
    longest_first = sorted(marks, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def num_held(text: str, marks: Iterable[str], *, holds_space: bool) -> int:
    """Characters at the end of a text that may be the beginning of a mark, or the white space before one."""
    most = min(len(text), max(map(len, marks), default=1) - 1)
    held = next((size for size in range(most, 0, -1) if any(mark.startswith(text[-size:]) for mark in marks)), 0)
    told = text[: len(text) - held]
    return len(text) - len(told.rstrip(SPACE)) if holds_space else held
