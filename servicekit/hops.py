"""What one hop costs: how long messages waited between sender and receiver, and how long they were handled."""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from penstock.v1 import status_pb2

# Upper bounds of histogram buckets, seconds: 10 µs to 10 s.
BOUNDS_S = (
    1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0,
)  # fmt: skip
# Messages kept for quantiles and rate; nothing else is done while they are sorted, several times a second.
RECENT = 256
WINDOW_S = 10.0  # how far back "the last seconds" reach


class Hop:
    """One stream that a service reads. One thread observes; any thread may read."""

    __slots__ = ("_recent", "_wait_counts", "_wait_sum", "_work_counts", "_work_sum", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self._wait_counts = [0] * (len(BOUNDS_S) + 1)
        self._work_counts = [0] * (len(BOUNDS_S) + 1)
        self._wait_sum = 0.0
        self._work_sum = 0.0
        self._recent: deque[tuple[int, float, float]] = deque(maxlen=RECENT)

    def observe(self, sent_unix_ns: int, now_unix_ns: int, work_s: float) -> None:
        """A message sent at the first time was received at the second and took `work_s` seconds to handle."""
        # Clocks of two hosts may disagree: a message from the future did not wait.
        wait_s = (now_unix_ns - sent_unix_ns) * 1e-9 if now_unix_ns > sent_unix_ns else 0.0
        self._wait_counts[bisect_left(BOUNDS_S, wait_s)] += 1
        self._work_counts[bisect_left(BOUNDS_S, work_s)] += 1
        self._wait_sum += wait_s
        self._work_sum += work_s
        self._recent.append((now_unix_ns, wait_s, work_s))

    def status(self, now_unix_ns: int) -> status_pb2.HopStatus:
        """Quantiles and rate over the last `WINDOW_S` seconds, or the last `RECENT` messages if there were more."""
        kept = list(self._recent)
        since = now_unix_ns - int(WINDOW_S * 1e9)
        recent = [each for each in kept if each[0] >= since]
        waits = sorted(each[1] for each in recent)
        works = sorted(each[2] for each in recent)
        # A full ring that lies within the window spans less than the window.
        span_s = (now_unix_ns - recent[0][0]) * 1e-9 if len(recent) == RECENT else WINDOW_S
        return status_pb2.HopStatus(
            hop=self.name,
            wait_p50_s=_quantile(waits, 0.5),
            wait_p99_s=_quantile(waits, 0.99),
            work_p50_s=_quantile(works, 0.5),
            work_p99_s=_quantile(works, 0.99),
            rate=len(recent) / max(span_s, 1e-9),
        )

    def histograms(self) -> tuple[tuple[list[int], float], tuple[list[int], float]]:
        """(counts per bucket, sum of seconds) of waiting and of handling."""
        return (list(self._wait_counts), self._wait_sum), (list(self._work_counts), self._work_sum)


class HopCollector(Collector):
    """`penstock_hop_wait_seconds{hop}` and `penstock_hop_work_seconds{hop}` of a service's hops."""

    def __init__(self, hops: Iterable[Hop]) -> None:
        self._hops = tuple(hops)

    def collect(self) -> Iterator[Metric]:
        """Called at each scrape."""
        wait = HistogramMetricFamily(
            "penstock_hop_wait_seconds", "Time from sending to receiving a message.", labels=["hop"]
        )
        work = HistogramMetricFamily("penstock_hop_work_seconds", "Time of handling a message.", labels=["hop"])
        for hop in self._hops:
            for family, (counts, total_s) in zip((wait, work), hop.histograms(), strict=True):
                family.add_metric([hop.name], cumulative(BOUNDS_S, counts), total_s)
        yield wait
        yield work


def cumulative(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Buckets as Prometheus wants them: (upper bound, observations up to it); `counts` has one more for +Inf."""
    buckets = []
    total = 0
    for bound, count in zip((*bounds, float("inf")), counts, strict=True):
        total += count
        buckets.append(("+Inf" if bound == float("inf") else repr(float(bound)), float(total)))
    return buckets


def _quantile(ordered: Sequence[float], q: float) -> float:
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else 0.0
