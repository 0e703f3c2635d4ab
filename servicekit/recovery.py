"""How long what a process held stood still when that process was lost."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from servicekit.hops import cumulative

BOUNDS_S = (0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 5.0, 10.0, 30.0, 60.0)
_MAX_LOSSES = 64  # that are waited for at once


@dataclass(slots=True, eq=False)
class _Loss:
    what: str
    since_ns: int
    request_ids: frozenset[bytes]


class Recoveries(Collector):
    """`penstock_recovery_seconds{what}`, and the losses whose requests have not gone on yet.

    Times are `time.monotonic_ns()`. One thread tells; any thread may collect.
    """

    def __init__(self, *what: str) -> None:
        """`what` may be lost, as the metric's label says it."""
        self._counts = {each: [0] * (len(BOUNDS_S) + 1) for each in what}
        self._sums = dict.fromkeys(what, 0.0)
        self._losses: list[_Loss] = []

    def observe(self, what: str, seconds: float) -> None:
        """What was lost goes on, so long after its process was last heard of."""
        self._counts[what][bisect_left(BOUNDS_S, seconds)] += 1
        self._sums[what] += seconds

    def lose(self, what: str, since_ns: int, request_ids: Iterable[bytes]) -> None:
        """These requests stand still since their process was last heard of."""
        if ids := frozenset(request_ids):
            self._losses = [*self._losses[1 - _MAX_LOSSES :], _Loss(what, since_ns, ids)]

    def resume(self, request_id: bytes, now_ns: int) -> None:
        """A request goes on. The first of those that a loss has stopped counts: others may wait for room."""
        for loss in [loss for loss in self._losses if request_id in loss.request_ids]:
            self._losses.remove(loss)
            self.observe(loss.what, (now_ns - loss.since_ns) / 1e9)

    def collect(self) -> Iterator[Metric]:
        """Called at each scrape."""
        text = "From the last sign of life of what was lost until it goes on."
        family = HistogramMetricFamily("penstock_recovery_seconds", text, labels=["what"])
        for what, counts in self._counts.items():
            family.add_metric([what], cumulative(BOUNDS_S, list(counts)), self._sums[what])
        yield family
