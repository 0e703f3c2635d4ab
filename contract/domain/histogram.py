"""Histograms: how many values fell between fixed bounds, and one of the values of each bucket as an example."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Exemplar:
    """Whose value it was."""

    request_id: bytes
    trace_id: str = ""  # 32 hexadecimal digits; empty: the request is not traced


class Histogram:
    """Counts by upper bound. One thread observes; any thread may read."""

    __slots__ = ("bounds", "counts", "exemplars", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds` ascend; a value belongs to the first that is not below it, or to none of them."""
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # by bound; the last one is beyond all
        self.total = 0.0  # of the values
        self.exemplars: dict[int, tuple[float, Exemplar]] = {}  # by bucket: the last value that came with one

    @property
    def mean(self) -> float:
        """Of all values; 0: there is none."""
        return self.total / max(1, sum(self.counts))

    def observe(self, value: float, exemplar: Exemplar | None = None) -> None:
        """Add one value."""
        bucket = bisect_left(self.bounds, value)
        self.counts[bucket] += 1
        self.total += value
        if exemplar is not None:
            self.exemplars[bucket] = (value, exemplar)

    def copy(self) -> "Histogram":
        """One that does not change any more."""
        copied = Histogram(self.bounds)
        copied.counts, copied.total, copied.exemplars = list(self.counts), self.total, dict(self.exemplars)
        return copied
