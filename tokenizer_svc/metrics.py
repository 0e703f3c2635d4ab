"""A tokenizer's counts as Prometheus metrics."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector


@dataclass(slots=True)
class TokenizerStats:
    """Counts since the start; written by the loop, read by anybody."""

    num_tokenized: int = 0  # prompts
    num_rejected: int = 0  # prompts
    num_tokens: int = 0  # of the prompts
    num_reclaimed: int = 0  # hints taken from other tokenizers
    num_dead_letters: int = 0
    num_long_prompts: int = 0  # in threads now


class TokenizerCollector(Collector):
    """`penstock_*` of a tokenizer, read at each scrape."""

    def __init__(self, stats: Callable[[], TokenizerStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        """Called at each scrape."""
        stats = self._stats()
        prompts = CounterMetricFamily("penstock_tokenizer_prompts", "Prompts by outcome.", labels=["outcome"])
        prompts.add_metric(["tokenized"], stats.num_tokenized)
        prompts.add_metric(["rejected"], stats.num_rejected)
        yield prompts
        yield CounterMetricFamily("penstock_tokenizer_tokens", "Tokens of the prompts.", value=stats.num_tokens)
        yield CounterMetricFamily(
            "penstock_tokenizer_reclaimed", "Prompts taken from tokenizers that died.", value=stats.num_reclaimed
        )
        dead = CounterMetricFamily("penstock_dead_letters", "Messages that could not be read.", labels=["stream"])
        dead.add_metric(["prompts"], stats.num_dead_letters)
        yield dead
        yield GaugeMetricFamily(
            "penstock_tokenizer_long_prompts", "Long prompts that threads work on.", value=stats.num_long_prompts
        )
