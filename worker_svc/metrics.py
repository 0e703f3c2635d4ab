"""A worker's counts as Prometheus metrics."""

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from servicekit.hops import cumulative
from worker_svc.core.stats import STEP_BOUNDS_S, WorkerStats


class WorkerCollector(Collector):
    """`penstock_*` of a worker, read at each scrape."""

    def __init__(self, stats: WorkerStats, plans_queued: Callable[[], int]) -> None:
        self._stats = stats
        self._plans_queued = plans_queued

    def collect(self) -> Iterator[Metric]:
        """Called at each scrape."""
        stats = self._stats
        steps = HistogramMetricFamily("penstock_step_seconds", "Device time of a step.")
        steps.add_metric([], cumulative(STEP_BOUNDS_S, list(stats.step_counts)), stats.step_sum_s)
        yield steps
        yield CounterMetricFamily(
            "penstock_device_idle_seconds", "Time between steps in which the device had nothing to do.", stats.idle_s
        )
        yield GaugeMetricFamily("penstock_plans_queued", "Plans read and not launched.", self._plans_queued())
        yield CounterMetricFamily("penstock_sampled_tokens", "Tokens sampled.", stats.num_tokens)
        yield CounterMetricFamily("penstock_epochs", "Pairings with a scheduler that began.", stats.num_epochs)
        yield InfoMetricFamily("penstock_worker", "What computes.", {"attention": stats.attention})
        dead = CounterMetricFamily("penstock_dead_letters", "Messages that could not be read.", labels=["stream"])
        dead.add_metric(["steps"], stats.num_dead_letters)
        yield dead
