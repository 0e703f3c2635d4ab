"""A detokenizer's counts as Prometheus metrics."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from detokenizer_svc.core.stats import DetokenizerStats
from servicekit.hops import hop_families
from servicekit.metric_families import CounterFamily, Family, GaugeFamily, dead_letters
from servicekit.pool_stats import POOL_FAMILIES
from servicekit.recovery import recovery_family

TOKENS = CounterFamily("penstock_detokenized_tokens_total", "Tokens that became text.")
REJECTED_ROWS = CounterFamily(
    "penstock_rejected_rows_total",
    "Rows of the log that did not extend a sequence: duplicate: they brought nothing new; gap: tokens before them are "
    "missing; mismatch: they go on with other tokens than those that are known; ended: the sequence had ended; "
    "unknown: the request was never opened here.",
    {"reason": ("duplicate", "gap", "mismatch", "ended", "unknown")},
)
LIVE_REQUESTS = GaugeFamily("penstock_live_requests", "Requests that go on.")
LEASED_SHARDS = GaugeFamily("penstock_leased_shards", "Shards of the log that this process reads.")
SHARD_REBUILDS = CounterFamily(
    "penstock_shard_rebuilds_total", "Shards that were taken and rebuilt from checkpoints and log."
)
SHARD_LOSSES = CounterFamily(
    "penstock_shard_losses_total", "Shards whose lease this process found lost while it read them."
)
RETIRED_REQUESTS = CounterFamily("penstock_retired_requests_total", "Requests whose result was written.")
STOP_STRING_ENDS = CounterFamily("penstock_stop_string_ends_total", "Sequences that a stop string ended.")
ORPHANED_REQUESTS = CounterFamily(
    "penstock_orphaned_requests_total", "Requests that were cancelled because their gateway died and did not come back."
)
COMPACTIONS = CounterFamily(
    "penstock_compactions_total", "Times that a log was replaced by checkpoints of its live requests."
)
CHECKPOINT_BYTES = CounterFamily("penstock_checkpoint_bytes_total", "Bytes of the checkpoints that were written.")
LOG_ENTRIES = GaugeFamily(
    "penstock_log_entries", "Entries of a leased shard's log, which a successor would have to read.", {"shard": ()}
)
LOG_BYTES = GaugeFamily("penstock_log_bytes", "Bytes of a leased shard's log.", {"shard": ()})
DEAD_LETTERS = dead_letters("tokens", "attach", "traces")
SPANS = CounterFamily("penstock_exported_spans_total", "Spans of traces that a collector took.")
EXPORT_FAILURES = CounterFamily("penstock_span_export_failures_total", "Times that a collector did not take spans.")
WAITING_TRACES = GaugeFamily("penstock_waiting_traces", "Entries of the stream of traces, by its last reader here.")
UNTOLD_TRACES = GaugeFamily(
    "penstock_untold_traces", "Entries that the stream of traces had no room for, since the pool began."
)

FAMILIES: tuple[Family, ...] = (
    *POOL_FAMILIES,
    *hop_families("tokens"),
    recovery_family("shard"),
    *(
        TOKENS,
        REJECTED_ROWS,
        LIVE_REQUESTS,
        LEASED_SHARDS,
        SHARD_REBUILDS,
        SHARD_LOSSES,
        RETIRED_REQUESTS,
        STOP_STRING_ENDS,
    ),
    *(ORPHANED_REQUESTS, COMPACTIONS, CHECKPOINT_BYTES, LOG_ENTRIES, LOG_BYTES, DEAD_LETTERS),
    *(SPANS, EXPORT_FAILURES, WAITING_TRACES, UNTOLD_TRACES),
)


@dataclass(slots=True)
class TracingStats:
    """Counts of the thread that exports traces; all are zero without a collector."""

    num_spans: int = 0  # that the collector took
    num_failures: int = 0  # times that it took none
    num_waiting: int = 0  # entries of the stream
    num_untold: int = 0  # entries that it had no room for
    num_dead_letters: int = 0


@dataclass(slots=True)
class ServiceStats:
    """Counts since the start; written by the loop, read by anybody."""

    core: DetokenizerStats
    num_live_requests: int = 0
    num_shards: int = 0  # leased now
    num_rebuilds: int = 0  # shards taken
    num_lost_shards: int = 0  # that were held until others had them, or nobody
    num_retired: int = 0  # requests
    num_stop_cancels: int = 0  # sequences that a stop string ended
    num_orphans: int = 0  # requests cancelled because their gateway stayed away
    num_compactions: int = 0  # with checkpoints
    num_checkpoint_bytes: int = 0  # written
    log_lengths: dict[int, tuple[int, int]] = field(default_factory=dict)  # entries and bytes by leased shard
    dead_letters: dict[str, int] = field(default_factory=lambda: {"tokens": 0, "attach": 0})
    tracing: TracingStats = field(default_factory=TracingStats)


class DetokenizerCollector(Collector):
    """`penstock_*` of a detokenizer, read at each scrape."""

    def __init__(self, stats: Callable[[], ServiceStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        """Called at each scrape."""
        stats = self._stats()
        core = stats.core
        yield TOKENS.of(core.num_tokens)
        yield REJECTED_ROWS.by(
            {
                "duplicate": core.num_duplicate_rows,
                "gap": core.num_gap_rows,
                "mismatch": core.num_mismatched_rows,
                "ended": core.num_ended_rows,
                "unknown": core.num_unknown_rows,
            }
        )
        yield LIVE_REQUESTS.of(stats.num_live_requests)
        yield LEASED_SHARDS.of(stats.num_shards)
        yield SHARD_REBUILDS.of(stats.num_rebuilds)
        yield SHARD_LOSSES.of(stats.num_lost_shards)
        yield RETIRED_REQUESTS.of(stats.num_retired)
        yield STOP_STRING_ENDS.of(stats.num_stop_cancels)
        yield ORPHANED_REQUESTS.of(stats.num_orphans)
        yield COMPACTIONS.of(stats.num_compactions)
        yield CHECKPOINT_BYTES.of(stats.num_checkpoint_bytes)
        lengths = list(stats.log_lengths.items())
        yield LOG_ENTRIES.by({str(shard): count for shard, (count, _) in lengths})
        yield LOG_BYTES.by({str(shard): size for shard, (_, size) in lengths})
        tracing = stats.tracing
        yield DEAD_LETTERS.by(stats.dead_letters | {"traces": tracing.num_dead_letters})
        yield SPANS.of(tracing.num_spans)
        yield EXPORT_FAILURES.of(tracing.num_failures)
        yield WAITING_TRACES.of(tracing.num_waiting)
        yield UNTOLD_TRACES.of(tracing.num_untold)
