"""The times at which requests are claimed, and since when each could be had."""

from servicekit.bus import keys
from servicekit.bus.calls import Entry

CLAIM_COUNT = 16  # requests of one turn: each takes a tenth of a millisecond and more, for which plans wait
ASK_AGAIN_NS = 50_000_000  # a pool that settles
SWEEP_NS = 1_000_000_000  # a hint may be lost: claim once in a while without one
MAX_HINTS = 4096


class Claiming:
    """The next claim; times are monotonic nanoseconds but for those of hints."""

    def __init__(self) -> None:
        self.is_due = True
        self._sweep_ns = 0
        self._hints: dict[bytes, int] = {}  # request → when its hint was sent, Unix nanoseconds

    def note(self, entry: Entry) -> None:
        """Remember since when a request could be had; to be called before what was claimed meanwhile is taken in."""
        if len(self._hints) >= MAX_HINTS:
            self._hints.clear()
        self._hints[entry.fields.get(keys.REQUEST, b"")] = number(entry, keys.SENT_NS)

    def hint(self, entry: Entry) -> None:
        """A request can be claimed, unless it was meanwhile."""
        self.is_due = self.is_due or entry.fields.get(keys.REQUEST, b"") in self._hints

    def take_hint(self, request_id: bytes, now_ns: int) -> int:
        """The time at which the request's hint was sent; `now_ns` if there was none. Unix nanoseconds."""
        return self._hints.pop(request_id, now_ns)

    def sweeps(self, now_ns: int) -> bool:
        """Return whether it is time to claim without a hint."""
        if now_ns < self._sweep_ns:
            return False
        self._sweep_ns = now_ns + SWEEP_NS
        self.is_due = True
        return True

    def settles(self, now_ns: int) -> None:
        """The pool had no answer yet."""
        self._sweep_ns = now_ns + ASK_AGAIN_NS


def number(entry: Entry, name: bytes) -> int:
    """A decimal field that only measures; 0 if it is missing or malformed."""
    text = entry.fields.get(name, b"")
    return int(text) if text.isdigit() else 0
