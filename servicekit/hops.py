"""The cost of one hop: how long messages waited between sender and receiver, and how long they were handled."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from contract.domain.histogram import Histogram
from contract.v1 import status_pb2
from servicekit.metric_families import HistogramFamily

# Upper bounds of histogram buckets, seconds: 10 µs to 10 s.
BOUNDS_S = (
    1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0,
)  # fmt: skip
# Messages kept for quantiles and rate; nothing else is done while they are sorted, several times a second.
RECENT = 256
WINDOW_S = 10.0  # how far back "the last seconds" reach


def hop_families(*hops: str) -> tuple[HistogramFamily, HistogramFamily]:
    """The families of waiting and of handling, of a service that reads these streams."""
    return (
        HistogramFamily(
            "penstock_hop_wait_seconds", "Time from sending a message to receiving it, by stream.", {"hop": hops}
        ),
        HistogramFamily("penstock_hop_work_seconds", "Time of handling a message, by stream.", {"hop": hops}),
    )


class Hop:
    """One stream that a service reads. One thread observes; any thread may read."""

    __slots__ = ("_recent", "name", "wait", "work")

    def __init__(self, name: str) -> None:
        self.name = name
        self.wait = Histogram(BOUNDS_S)  # seconds
        self.work = Histogram(BOUNDS_S)  # seconds
        self._recent: deque[tuple[int, float, float]] = deque(maxlen=RECENT)

    def observe(self, sent_unix_ns: int, now_unix_ns: int, work_s: float) -> None:
        """A message sent at the first time was received at the second and took `work_s` seconds to handle."""
        # Clocks of two hosts may disagree: a message from the future did not wait.
        wait_s = (now_unix_ns - sent_unix_ns) * 1e-9 if now_unix_ns > sent_unix_ns else 0.0
        self.wait.observe(wait_s)
        self.work.observe(work_s)
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


class HopCollector(Collector):
    """`penstock_hop_wait_seconds{hop}` and `penstock_hop_work_seconds{hop}` of a service's hops."""

    def __init__(self, hops: Iterable[Hop]) -> None:
        self._hops = tuple(hops)
        self._wait, self._work = hop_families(*(hop.name for hop in self._hops))

    def collect(self) -> Iterator[Metric]:
        """Called at each scrape."""
        yield self._wait.by({hop.name: hop.wait for hop in self._hops})
        yield self._work.by({hop.name: hop.work for hop in self._hops})


def _quantile(ordered: Sequence[float], q: float) -> float:
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else 0.0
