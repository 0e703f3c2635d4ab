"""A worker's counts as Prometheus metrics."""

from collections.abc import Callable, Iterator

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from contract import __version__
from servicekit.hops import hop_families
from servicekit.metric_families import (
    CounterFamily,
    Family,
    GaugeFamily,
    HistogramFamily,
    InfoFamily,
    dead_letters,
    model_info,
)
from servicekit.pool_stats import POOL_FAMILIES
from worker_svc.core.stats import ExecutionStats

STEP = HistogramFamily("penstock_step_seconds", "Device time of a step.")
DEVICE_IDLE = CounterFamily(
    "penstock_device_idle_seconds_total", "Time between steps in which the device had nothing to do."
)
PLANS_QUEUED = GaugeFamily("penstock_plans_queued", "Plans that were read and not launched yet.")
SAMPLED_TOKENS = CounterFamily("penstock_sampled_tokens_total", "Tokens that were sampled.")
PAIRINGS = CounterFamily("penstock_pairings_total", "Pairings with a scheduler that began.")
WORKER = InfoFamily(
    "penstock_worker_info",
    "Whose kernels compute, attend for long chunks of prompts and multiply many rows, and whose module is run.",
    {"attention": ()},
)
MODEL = model_info()
DEAD_LETTERS = dead_letters("steps")

FAMILIES: tuple[Family, ...] = (
    *POOL_FAMILIES,
    *hop_families("steps"),
    STEP,
    DEVICE_IDLE,
    PLANS_QUEUED,
    SAMPLED_TOKENS,
    PAIRINGS,
    WORKER,
    MODEL,
    DEAD_LETTERS,
)


class WorkerCollector(Collector):
    """`penstock_*` of a worker, read at each scrape."""

    def __init__(
        self, stats: ExecutionStats, plans_queued: Callable[[], int], model: Callable[[], tuple[str, str]]
    ) -> None:
        """`model`: its name and digest; an empty digest: it is not loaded yet."""
        self._stats = stats
        self._model = model
        self._plans_queued = plans_queued

    def collect(self) -> Iterator[Metric]:
        """Called at each scrape."""
        stats = self._stats
        yield STEP.of(stats.step)
        yield DEVICE_IDLE.of(stats.idle_s)
        yield PLANS_QUEUED.of(self._plans_queued())
        yield SAMPLED_TOKENS.of(stats.num_tokens)
        yield PAIRINGS.of(stats.num_pairings)
        yield WORKER.of((stats.attention,))
        name, digest = self._model()
        yield MODEL.of(*([(name, digest, __version__)] if digest else []))
        yield DEAD_LETTERS.by({"steps": stats.num_dead_letters})
