"""A bus in memory that counts."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from memory_bus import MemoryBus

from servicekit.bus.calls import Call


class WatchedBus(MemoryBus):
    """Counts the calls that are carried out, by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[type] = Counter()

    def apply(self, calls: Sequence[Call[Any]], wake: Callable[[], None]) -> list[Any]:
        self.counts.update(map(type, calls))
        return super().apply(calls, wake)
