"""Stop strings across token borders."""


class StopStrings:
    """Looks for the stop strings of one sequence in its text, piece by piece, and holds back what may be one.

    The stop that is complete first wins, of two that are complete at the same character the one that began first; so
    the outcome does not depend on how the text is cut into pieces.
    """

    __slots__ = ("_firsts", "_include", "_stops", "_tail")

    def __init__(self, stops: tuple[str, ...], *, include_in_output: bool) -> None:
        self._stops = stops
        self._firsts = frozenset(stop[0] for stop in stops)
        self._include = include_in_output
        self._tail = ""  # the longest end of the text so far that a stop string begins with

    def passes(self, piece: str) -> bool:
        """Return whether no stop string can begin or end in a piece, so that it is output and changes nothing here."""
        return not self._tail and self._firsts.isdisjoint(piece)

    def feed(self, piece: str, *, search: bool = True) -> tuple[str, str | None]:
        """Adds a piece of text.

        Args:
            piece: what the sequence's text goes on with.
            search: whether a stop string may end within this piece (false before min_tokens).

        Returns:
            The text that is certain to be output, and the stop string that was found. With one found, the text ends
            right before it, or right after it if it is part of the output.
        """
        if not piece:
            return "", None
        tail = self._tail
        text = tail + piece
        if search and (found := self._find(text, len(tail))) is not None:
            start, stop = found
            self._tail = ""
            return (text[len(tail) : start + len(stop)] if self._include else text[:start]), stop
        held = max(_overlap(text, stop) for stop in self._stops)
        self._tail = text[len(text) - held :]
        return (piece if self._include else text[: len(text) - held]), None

    def release(self) -> str:
        """The text that was held back, for a sequence that ends otherwise."""
        held = "" if self._include else self._tail
        self._tail = ""
        return held

    def _find(self, text: str, known: int) -> tuple[int, str] | None:
        """The first stop that ends after the first `known` characters: where it begins, and which."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop, max(0, known - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else best[1:]


def _overlap(text: str, stop: str) -> int:
    """The number of characters at the end of `text` that begin `stop` without completing it; the most there are."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0:
        if stop.startswith(text[start:]):
            return len(text) - start
        start = text.find(stop[0], start + 1)
    return 0
