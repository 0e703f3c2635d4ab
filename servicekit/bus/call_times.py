"""Times until the server answers, by call."""

import re
import threading
from collections.abc import Sequence
from typing import Any

from contract.domain.histogram import Histogram
from servicekit.bus.calls import Call, Read, ReadGroup

# Upper bounds of histogram buckets, seconds: 50 µs to 3 s, after which a server that is silent counts as gone.
BOUNDS_S = (5e-5, 1e-4, 2e-4, 4e-4, 8e-4, 1.6e-3, 3.2e-3, 6.4e-3, 0.0128, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 3.0)
_READS = (Read, ReadGroup)  # each exchange looks here: a tuple is faster than a union
SEVERAL = "batch"  # calls in one write, whose parts cannot be told


class CallTimes:
    """Histograms by call, of all connections of one bus; any thread may observe and read.

    What is observed is an exchange: from its write to its first answer. A read at the end of it may wait for entries,
    long after the server has answered the calls before it; an exchange of nothing but such a read is not observed.
    """

    def __init__(self) -> None:
        self._histograms: dict[type[Call[Any]] | None, Histogram] = {}  # None: of several calls
        self._lock = threading.Lock()

    def observe(self, calls: Sequence[Call[Any]], seconds: float) -> None:
        """Note how long after their write the first answer to these calls came."""
        last, num_calls = calls[-1], len(calls)
        if type(last) in _READS and (num_calls > 1 or last.block_ms):  # type: ignore[attr-defined]
            num_calls -= 1
            if not num_calls:
                return
        kind = type(calls[0]) if num_calls == 1 else None
        with self._lock:
            histogram = self._histograms.get(kind)
            if histogram is None:
                histogram = self._histograms[kind] = Histogram(BOUNDS_S)
            histogram.observe(seconds)

    def by_call(self) -> dict[str, Histogram]:
        """The histograms by the name of the call."""
        with self._lock:
            return {_name(kind): histogram.copy() for kind, histogram in self._histograms.items()}


def _name(kind: type[Call[Any]] | None) -> str:
    return SEVERAL if kind is None else re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__).lower()
