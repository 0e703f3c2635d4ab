"""Ends of JSON values in a text that is still growing; a value is looked at for its brackets and strings only."""

import re

_IN_STRING = re.compile(r'["\\]')
_BRACKETS = {"{": 1, "[": 1, "}": -1, "]": -1}
BEGINS = '{["'  # first characters of the values that can be followed


class JsonSpan:
    """A place in an object, a list or a string."""

    __slots__ = ("_depth", "_in_string", "_stop", "_structure", "is_over")

    def __init__(self, stop: str = "") -> None:
        """`stop` ends the value wherever it comes outside of strings, though brackets are open."""
        self._depth = 0
        self._in_string = False
        self._stop = stop
        self._structure = re.compile(f'["{{}}\\[\\]{re.escape(stop[:1])}]')
        self.is_over = False

    def advance(self, text: str, *, is_last: bool = False) -> int:
        """The number of characters of `text`, which goes on where the last ones ended, that belong to the value.

        Fewer than there are: the value is over, or the rest is to come again with more (an escape, a stop that begins).
        """
        at = 0
        while at < len(text) and not self.is_over:
            step = self._string(text, at, is_last) if self._in_string else self._outside(text, at, is_last)
            if step is None:
                break
            at = step
        return at

    def _string(self, text: str, at: int, is_last: bool) -> int | None:
        found = _IN_STRING.search(text, at)
        if found is None:
            return len(text)
        if found[0] == "\\":
            if found.end() < len(text) or is_last:
                return min(found.end() + 1, len(text))
            return found.start() if found.start() > at else None
        self._in_string = False
        self.is_over = self._depth == 0
        return found.end()

    def _outside(self, text: str, at: int, is_last: bool) -> int | None:
        found = self._structure.search(text, at)
        if found is None:
            return len(text)
        if found[0] == '"':
            self._in_string = True
            return found.end()
        if found[0] in _BRACKETS:
            self._depth += _BRACKETS[found[0]]
            self.is_over = self._depth <= 0
            return found.end()
        if text.startswith(self._stop, found.start()):
            self.is_over = True
            return found.start()
        if self._stop.startswith(text[found.start() :]) and not is_last:
            return found.start() if found.start() > at else None
        return found.end()


def value_end(text: str, start: int) -> int | None:
    """The end of the value that begins at `start` with one of `BEGINS`; None: it is not all there."""
    span = JsonSpan()
    end = start + span.advance(text[start:])
    return end if span.is_over else None
