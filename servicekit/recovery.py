"""The time for which work stood still because its process was lost."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from contract.domain.histogram import Histogram
from servicekit.metric_families import HistogramFamily

BOUNDS_S = (0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 5.0, 10.0, 30.0, 60.0)
_MAX_LOSSES = 64  # that are waited for at once


def recovery_family(*lost: str) -> HistogramFamily:
    """The family of a service that notices the loss of these."""
    return HistogramFamily(
        "penstock_recovery_seconds",
        "Time from the last sign of life of a lost worker, scheduler or holder of a shard until its requests go on; "
        "of a lost tokenizer, the age of its prompts when another took them.",
        {"lost": lost},
    )


@dataclass(slots=True, eq=False)
class _Loss:
    lost: str
    since_ns: int
    request_ids: frozenset[bytes]


class Recoveries(Collector):
    """`penstock_recovery_seconds{lost}`, and the losses whose requests have not gone on yet.

    Times are `time.monotonic_ns()`. One thread tells; any thread may collect.
    """

    def __init__(self, *lost: str) -> None:
        """`lost`: what may be, as the metric's label says it."""
        self._family = recovery_family(*lost)
        self._histograms = {each: Histogram(BOUNDS_S) for each in lost}
        self._losses: list[_Loss] = []

    def observe(self, lost: str, seconds: float) -> None:
        """Note that lost work goes on, so long after its process was last heard of."""
        self._histograms[lost].observe(seconds)

    def lose(self, lost: str, since_ns: int, request_ids: Iterable[bytes]) -> None:
        """These requests stand still since their process was last heard of."""
        if ids := frozenset(request_ids):
            self._losses = [*self._losses[1 - _MAX_LOSSES :], _Loss(lost, since_ns, ids)]

    def resume(self, request_id: bytes, now_ns: int) -> None:
        """A request goes on. The first of those that a loss has stopped counts: others may wait for room."""
        for loss in [loss for loss in self._losses if request_id in loss.request_ids]:
            self._losses.remove(loss)
            self.observe(loss.lost, (now_ns - loss.since_ns) / 1e9)

    def collect(self) -> Iterator[Metric]:
        """Called at each scrape."""
        yield self._family.by(self._histograms)
