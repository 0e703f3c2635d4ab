"""A scheduler's stats as Prometheus metrics."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from contract.domain.histogram import Histogram
from contract.domain.plan import StepPlan
from scheduler_svc.core.rows import OUTCOMES
from scheduler_svc.core.stats import SchedulerStats, WorkerStats
from servicekit.hops import Hop, hop_families
from servicekit.metric_families import CounterFamily, Family, GaugeFamily, HistogramFamily, dead_letters
from servicekit.pool_stats import POOL_FAMILIES
from servicekit.recovery import Recoveries, recovery_family

SIZE_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

_STREAMS = ("requests", "results", "cancels", "worker")  # `worker`: what one says of itself when it is paired

PROMPT_TOKENS = CounterFamily("penstock_prompt_tokens_total", "Tokens of the prompts of requests that got a slot.")
GENERATED_TOKENS = CounterFamily("penstock_generated_tokens_total", "Output tokens.")
CACHED_TOKENS = CounterFamily("penstock_cached_tokens_total", "Tokens of prompts that were found in the prefix cache.")
DISCARDED_TOKENS = CounterFamily(
    "penstock_discarded_tokens_total", "Tokens that were sampled for sequences that had ended or were preempted."
)
RESTORED_TOKENS = CounterFamily(
    "penstock_restored_tokens_total", "Tokens that clients had and the log had not, after Redis lost its last writes."
)
PREEMPTIONS = CounterFamily("penstock_preemptions_total", "Sequences that were put back for want of KV blocks.")
PREFILL_ONLY_STEPS = CounterFamily(
    "penstock_prefill_only_steps_total", "Steps that left out what decodes, in a burst of prompts."
)
QUEUE_TIME = HistogramFamily(
    "penstock_queue_time_seconds", "Time from a scheduler's claim of a request to its first slot; one for each request."
)
FINISHED_REQUESTS = CounterFamily(
    "penstock_finished_requests_total", "Requests that ended in a scheduler, where stop strings are not looked for.",
    {"outcome": tuple(OUTCOMES)},
)  # fmt: skip
SEQUENCES = GaugeFamily("penstock_sequences", "Sequences of a scheduler.", {"state": ("waiting", "running")})
KV_BLOCKS = GaugeFamily(
    "penstock_kv_blocks",
    "KV blocks of a worker: used by sequences; cached: free, with content that can be found again; free.",
    {"worker": (), "state": ("used", "cached", "free")},
)
SAVED_STATES = GaugeFamily(
    "penstock_saved_states",
    "States that a worker can save for sequences with the same first tokens, where layers keep some: used, free.",
    {"worker": (), "state": ("used", "free")},
)
PLANS_IN_FLIGHT = GaugeFamily("penstock_plans_in_flight", "Plans sent to a worker and not answered.", {"worker": ()})
LOG_BACKLOG = GaugeFamily(
    "penstock_log_backlog",
    "Entries of a shard's log that its detokenizer has not read; beyond `--max-log-backlog` no steps are "
    "planned for it.",
    {"shard": ()},
)
BATCH_SEQUENCES = HistogramFamily("penstock_batch_sequences", "Sequences of a step.")
STEP_TOKENS = HistogramFamily("penstock_step_tokens", "Tokens of a step.")
DEAD_LETTERS = dead_letters(*_STREAMS)

FAMILIES: tuple[Family, ...] = (
    *POOL_FAMILIES,
    *hop_families("results", "requests", "cancels"),
    recovery_family("worker", "scheduler"),
    *(PROMPT_TOKENS, GENERATED_TOKENS, CACHED_TOKENS, DISCARDED_TOKENS, RESTORED_TOKENS, PREEMPTIONS),
    *(PREFILL_ONLY_STEPS, QUEUE_TIME),
    *(FINISHED_REQUESTS, SEQUENCES, KV_BLOCKS, SAVED_STATES),
    *(PLANS_IN_FLIGHT, LOG_BACKLOG, BATCH_SEQUENCES, STEP_TOKENS),
    DEAD_LETTERS,
)


@dataclass(slots=True)
class Meters:
    """Counts of the loop beside the core's stats."""

    results: Hop = field(default_factory=lambda: Hop("results"))
    requests: Hop = field(default_factory=lambda: Hop("requests"))
    cancels: Hop = field(default_factory=lambda: Hop("cancels"))
    batch_sequences: Histogram = field(default_factory=lambda: Histogram(SIZE_BOUNDS))
    step_tokens: Histogram = field(default_factory=lambda: Histogram(SIZE_BOUNDS))
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
        stats, meters = self._stats(), self._meters
        totals = stats.counters
        yield PROMPT_TOKENS.of(totals.num_prompt_tokens)
        yield GENERATED_TOKENS.of(totals.num_generated_tokens)
        yield CACHED_TOKENS.of(totals.num_cached_tokens)
        yield DISCARDED_TOKENS.of(totals.num_discarded_tokens)
        yield RESTORED_TOKENS.of(meters.num_restored_tokens)
        yield PREEMPTIONS.of(totals.num_preemptions)
        yield PREFILL_ONLY_STEPS.of(totals.num_prefill_only_steps)
        yield QUEUE_TIME.of(totals.queue_time)
        yield FINISHED_REQUESTS.by(totals.num_finished_requests)
        yield SEQUENCES.by({"waiting": stats.num_waiting_seqs, "running": stats.num_running_seqs})
        yield KV_BLOCKS.by(_kv_blocks(stats.workers))
        yield SAVED_STATES.by(_saved_states(stats.workers))
        yield PLANS_IN_FLIGHT.by({name: worker.num_plans_in_flight for name, worker in stats.workers.items()})
        yield LOG_BACKLOG.by({str(shard): length for shard, length in meters.log_backlogs.items()})
        yield BATCH_SEQUENCES.of(meters.batch_sequences)
        yield STEP_TOKENS.of(meters.step_tokens)
        yield DEAD_LETTERS.by(dict(meters.dead_letters))


def _saved_states(workers: Mapping[str, WorkerStats]) -> dict[tuple[str, str], int]:
    """Saved states by worker, those that stand for a prefix and those that do not."""
    states: dict[tuple[str, str], int] = {}
    for name, worker in workers.items():
        states[name, "used"] = worker.num_used_states
        states[name, "free"] = worker.num_saved_states - worker.num_used_states
    return states


def _kv_blocks(workers: Mapping[str, WorkerStats]) -> dict[tuple[str, str], int]:
    """Blocks by worker and state."""
    blocks: dict[tuple[str, str], int] = {}
    for name, worker in workers.items():
        blocks[name, "used"] = worker.num_used_blocks
        blocks[name, "cached"] = worker.num_cached_blocks
        blocks[name, "free"] = worker.num_free_blocks - worker.num_cached_blocks
    return blocks
