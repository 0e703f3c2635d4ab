"""A detokenizer's counts as Prometheus metrics."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from detokenizer_svc.core.detokenizer import DetokenizerStats


@dataclass(slots=True)
class ServiceStats:
    """Counts since the start; written by the loop, read by anybody."""

    core: DetokenizerStats
    num_live_requests: int = 0
    num_shards: int = 0  # leased now
    num_rebuilds: int = 0  # shards taken
    num_retired: int = 0  # requests
    num_stop_cancels: int = 0  # sequences that a stop string ended
    num_orphans: int = 0  # requests cancelled because their gateway stayed away
    num_compactions: int = 0  # with checkpoints
    num_checkpoint_bytes: int = 0  # written
    log_lengths: dict[int, tuple[int, int]] = field(default_factory=dict)  # entries and bytes by leased shard
    dead_letters: dict[str, int] = field(default_factory=lambda: {"tokens": 0, "attach": 0})


class DetokenizerCollector(Collector):
    """`penstock_*` of a detokenizer, read at each scrape."""

    def __init__(self, stats: Callable[[], ServiceStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        """Called at each scrape."""
        stats = self._stats()
        core = stats.core
        yield CounterMetricFamily("penstock_detokenized_tokens", "Tokens that became text.", value=core.num_tokens)
        rejected = CounterMetricFamily(
            "penstock_rejected_rows", "Rows of the log that did not extend a sequence.", labels=["why"]
        )
        for why, count in (
            ("duplicate", core.num_duplicate_rows),
            ("gap", core.num_gap_rows),
            ("splice", core.num_spliced_rows),
            ("ended", core.num_ended_rows),
            ("unknown", core.num_unknown_rows),
        ):
            rejected.add_metric([why], count)
        yield rejected
        yield GaugeMetricFamily("penstock_live_requests", "Requests that go on.", value=stats.num_live_requests)
        yield GaugeMetricFamily("penstock_leased_shards", "Shards that this process reads.", value=stats.num_shards)
        yield CounterMetricFamily("penstock_shard_rebuilds", "Shards taken and rebuilt.", value=stats.num_rebuilds)
        yield CounterMetricFamily("penstock_retired_requests", "Requests ended here.", value=stats.num_retired)
        yield CounterMetricFamily(
            "penstock_stop_string_ends", "Sequences that a stop string ended.", value=stats.num_stop_cancels
        )
        yield CounterMetricFamily(
            "penstock_orphaned_requests", "Requests cancelled: their gateway stayed away.", value=stats.num_orphans
        )
        yield CounterMetricFamily(
            "penstock_compactions", "Times that a log was replaced by checkpoints.", value=stats.num_compactions
        )
        yield CounterMetricFamily(
            "penstock_checkpoint_bytes", "Bytes of checkpoints written.", value=stats.num_checkpoint_bytes
        )
        entries = GaugeMetricFamily("penstock_log_entries", "Entries of a leased shard's log.", labels=["shard"])
        num_bytes = GaugeMetricFamily("penstock_log_bytes", "Bytes of a leased shard's log.", labels=["shard"])
        for shard, (count, size) in stats.log_lengths.items():
            entries.add_metric([str(shard)], count)
            num_bytes.add_metric([str(shard)], size)
        yield entries
        yield num_bytes
        dead = CounterMetricFamily("penstock_dead_letters", "Messages that could not be read.", labels=["stream"])
        for stream, count in stats.dead_letters.items():
            dead.add_metric([stream], count)
        yield dead
