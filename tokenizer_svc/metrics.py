"""A tokenizer's counts as Prometheus metrics."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from servicekit.hops import hop_families
from servicekit.metric_families import CounterFamily, Family, GaugeFamily, dead_letters
from servicekit.pool_stats import POOL_FAMILIES
from servicekit.recovery import recovery_family

PROMPTS = CounterFamily(
    "penstock_tokenizer_prompts_total",
    "Prompts that were tokenized or rejected.",
    {"outcome": ("tokenized", "rejected")},
)
TOKENS = CounterFamily("penstock_tokenizer_tokens_total", "Tokens of the prompts that were tokenized.")
RECLAIMED = CounterFamily(
    "penstock_tokenizer_reclaimed_prompts_total", "Prompts that were taken from tokenizers that died."
)
DEAD_LETTERS = dead_letters("prompts")
LONG_PROMPTS = GaugeFamily("penstock_tokenizer_long_prompts", "Long prompts that threads work on now.")

FAMILIES: tuple[Family, ...] = (
    *POOL_FAMILIES,
    *hop_families("prompts"),
    recovery_family("prompt"),
    PROMPTS,
    TOKENS,
    RECLAIMED,
    DEAD_LETTERS,
    LONG_PROMPTS,
)


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
        yield PROMPTS.by({"tokenized": stats.num_tokenized, "rejected": stats.num_rejected})
        yield TOKENS.of(stats.num_tokens)
        yield RECLAIMED.of(stats.num_reclaimed)
        yield DEAD_LETTERS.by({"prompts": stats.num_dead_letters})
        yield LONG_PROMPTS.of(stats.num_long_prompts)
