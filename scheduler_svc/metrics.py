"""A scheduler's stats as Prometheus metrics."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from penstock.domain.plan import StepPlan
from scheduler_svc.core.stats import SchedulerStats
from servicekit.hops import Hop, cumulative
from servicekit.recovery import Recoveries

SIZE_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

_STREAMS = ("requests", "results", "cancels", "worker")  # `worker`: what one says of itself when it is paired


class Sizes:
    """How large things were: counts in powers of two. One thread observes; any thread may read."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(SIZE_BOUNDS) + 1)
        self.total = 0

    def observe(self, size: int) -> None:
        """One more of this size."""
        self.counts[bisect_left(SIZE_BOUNDS, size)] += 1
        self.total += size


@dataclass(slots=True)
class Meters:
    """What the loop counts beside the core's stats."""

    results: Hop = field(default_factory=lambda: Hop("results"))
    requests: Hop = field(default_factory=lambda: Hop("requests"))
    cancels: Hop = field(default_factory=lambda: Hop("cancels"))
    batch_sequences: Sizes = field(default_factory=Sizes)
    step_tokens: Sizes = field(default_factory=Sizes)
    recoveries: Recoveries = field(default_factory=lambda: Recoveries("worker", "scheduler"))
    num_restored_tokens: int = 0  # that clients had and the log did not
    dead_letters: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(_STREAMS, 0)))  # by stream

    log_backlogs: dict[int, int] = field(default_factory=dict)  # entries that are not read yet, by shard

    def note_plan(self, plan: StepPlan, now_ns: int) -> None:
        """A plan was made; whoever it admits goes on, monotonic nanoseconds."""
        self.batch_sequences.observe(len(plan.slots))
        self.step_tokens.observe(int(plan.num_tokens.sum()))
        for admission in plan.admissions:
            self.recoveries.resume(admission.request_id, now_ns)

    @property
    def hops(self) -> tuple[Hop, ...]:
        """The hops that a scheduler reads."""
        return (self.results, self.requests, self.cancels)


class SchedulerCollector(Collector):
    """`penstock_*` of a scheduler, read at each scrape."""

    def __init__(self, stats: Callable[[], SchedulerStats], meters: Meters) -> None:
        self._stats = stats
        self._meters = meters

    def collect(self) -> Iterator[Metric]:
        """Called at each scrape."""
        stats = self._stats()
        totals = stats.counters
        for name, text, value in (
            ("penstock_prompt_tokens", "Prompt tokens of admitted requests.", totals.num_prompt_tokens),
            ("penstock_generated_tokens", "Output tokens.", totals.num_generated_tokens),
            ("penstock_cached_tokens", "Prompt tokens found in the prefix cache.", totals.num_cached_tokens),
            ("penstock_wasted_tokens", "Tokens sampled for sequences that had left.", totals.num_wasted_tokens),
            (
                "penstock_restored_tokens",
                "Tokens that clients had and the log had lost.",
                self._meters.num_restored_tokens,
            ),
            ("penstock_preemptions", "Sequences put back for want of blocks.", totals.num_preemptions),
            ("penstock_admitted_requests", "Requests that got their first slot.", totals.num_admitted_requests),
            ("penstock_admission_wait_seconds", "Their time from claim to slot, summed.", totals.waiting_ns / 1e9),
        ):
            yield CounterMetricFamily(name, text, value=value)
        finished = CounterMetricFamily("penstock_finished_requests", "Ended here, by outcome.", labels=["outcome"])
        for outcome, count in totals.num_finished_requests.items():
            finished.add_metric([outcome], count)
        yield finished
        sequences = GaugeMetricFamily("penstock_sequences", "Sequences by state.", labels=["state"])
        sequences.add_metric(["waiting"], stats.num_waiting_seqs)
        sequences.add_metric(["running"], stats.num_running_seqs)
        yield sequences
        yield from _worker_metrics(stats)
        backlogs = GaugeMetricFamily(
            "penstock_log_backlog", "Entries of a shard's log that its detokenizer has not read.", labels=["shard"]
        )
        for shard, length in self._meters.log_backlogs.items():
            backlogs.add_metric([str(shard)], length)
        yield backlogs
        yield _histogram("penstock_batch_sequences", "Sequences of a step.", self._meters.batch_sequences)
        yield _histogram("penstock_step_tokens", "Tokens of a step.", self._meters.step_tokens)
        dead = CounterMetricFamily("penstock_dead_letters", "Messages that could not be read.", labels=["stream"])
        for stream, count in list(self._meters.dead_letters.items()):
            dead.add_metric([stream], count)
        yield dead


def _worker_metrics(stats: SchedulerStats) -> Iterator[Metric]:
    blocks = GaugeMetricFamily("penstock_kv_blocks", "KV blocks by state.", labels=["worker", "state"])
    plans = GaugeMetricFamily("penstock_plans_in_flight", "Plans sent and not answered.", labels=["worker"])
    for name, worker in stats.workers.items():
        blocks.add_metric([name, "used"], worker.num_used_blocks)
        blocks.add_metric([name, "cached"], worker.num_cached_blocks)
        blocks.add_metric([name, "free"], worker.num_free_blocks - worker.num_cached_blocks)
        plans.add_metric([name], worker.num_plans_in_flight)
    yield blocks
    yield plans


def _histogram(name: str, documentation: str, sizes: Sizes) -> Metric:
    family = HistogramMetricFamily(name, documentation)
    family.add_metric([], cumulative(SIZE_BOUNDS, list(sizes.counts)), sizes.total)
    return family
