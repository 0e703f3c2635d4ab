"""A gateway's figures under the names of vLLM's metrics: for aiperf, inference gateways and boards that read these.

A gateway stands for whole pools, each under the name of its model: what waits and runs, and the KV cache, are those of
all workers.
"""

from collections import Counter
from collections.abc import Iterator

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gateway_svc.core.stats import GatewayStats, Outcome
from gateway_svc.pools import Pools
from servicekit.metric_families import CounterFamily, Family, GaugeFamily, HistogramFamily, InfoFamily

_MODEL = "model_name"  # the first name that the model is served by
_REASONS = {
    "stop": Outcome.STOP,
    "length": Outcome.LENGTH,
    "repetition": Outcome.REPETITION,
    "abort": Outcome.CANCELLED,
}

WAITING = GaugeFamily("vllm:num_requests_waiting", "Requests of the pool that wait for their first slot.", {_MODEL: ()})
RUNNING = GaugeFamily(
    "vllm:num_requests_running",
    "Sequences of the pool that have a slot, as schedulers say once a second.",
    {_MODEL: ()},
)
KV_CACHE_USAGE = GaugeFamily(
    "vllm:kv_cache_usage_perc", "Used part of the KV blocks of all workers: 1 is all of them.", {_MODEL: ()}
)
CACHE_CONFIG = InfoFamily(
    "vllm:cache_config_info",
    "Tokens of a KV block, and how many blocks all workers with such blocks have together.",
    {"block_size": (), "num_gpu_blocks": ()},
)
TIME_TO_FIRST_TOKEN = HistogramFamily(
    "vllm:time_to_first_token_seconds", "The same as `penstock_time_to_first_token_seconds`.", {_MODEL: ()}
)
INTER_TOKEN_LATENCY = HistogramFamily(
    "vllm:inter_token_latency_seconds", "The same as `penstock_inter_token_latency_seconds`.", {_MODEL: ()}
)
E2E_REQUEST_LATENCY = HistogramFamily(
    "vllm:e2e_request_latency_seconds", "The same as `penstock_e2e_request_latency_seconds`.", {_MODEL: ()}
)
PROMPT_TOKENS = CounterFamily(
    "vllm:prompt_tokens_total",
    "Tokens of the prompts of requests whose first text this gateway handed out.",
    {_MODEL: ()},
)
GENERATION_TOKENS = CounterFamily(
    "vllm:generation_tokens_total", "The same as `penstock_delivered_tokens_total`.", {_MODEL: ()}
)
REQUEST_SUCCESS = CounterFamily(
    "vllm:request_success_total", "Requests that this gateway answered, or that were cancelled, by how they ended.",
    {_MODEL: (), "finished_reason": tuple(_REASONS)},
)  # fmt: skip

FAMILIES: tuple[Family, ...] = (
    *(WAITING, RUNNING, KV_CACHE_USAGE, CACHE_CONFIG, TIME_TO_FIRST_TOKEN, INTER_TOKEN_LATENCY, E2E_REQUEST_LATENCY),
    *(PROMPT_TOKENS, GENERATION_TOKENS, REQUEST_SUCCESS),
)


class VllmCollector(Collector):
    """`vllm:*`, read at each scrape."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools

    def collect(self) -> Iterator[Metric]:
        """Called at each scrape."""
        stats = self._by_model()
        blocks: Counter[int] = Counter()
        for each in stats.values():
            blocks.update(each.kv_blocks)
        yield WAITING.by({model: of.num_waiting for model, of in stats.items()})
        yield RUNNING.by({model: of.load.num_running for model, of in stats.items()})
        yield KV_CACHE_USAGE.by({model: of.load.kv_usage for model, of in stats.items()})
        yield CACHE_CONFIG.of(*((str(size), str(number)) for size, number in sorted(blocks.items())))
        yield TIME_TO_FIRST_TOKEN.by({model: of.time_to_first_token for model, of in stats.items()})
        yield INTER_TOKEN_LATENCY.by({model: of.inter_token_latency for model, of in stats.items()})
        yield E2E_REQUEST_LATENCY.by({model: of.e2e_request_latency for model, of in stats.items()})
        yield PROMPT_TOKENS.by(
            {model: sum(each.num_prompt for each in list(of.tenants.values())) for model, of in stats.items()}
        )
        yield GENERATION_TOKENS.by({model: of.num_tokens for model, of in stats.items()})
        yield REQUEST_SUCCESS.by(
            {
                (model, reason): of.outcomes[outcome]
                for model, of in stats.items()
                for reason, outcome in _REASONS.items()
            }
        )

    def _by_model(self) -> dict[str, GatewayStats]:
        """Each pool by the first name that its model answers to; without one, it is not told beside others."""
        pools = self._pools.all
        if len(pools) == 1:
            models = pools[0].stats.models
            return {models[0][0] if models else "": pools[0].stats}
        first = {offer.pool: model.name for model, offer in reversed(self._pools.routes.models)}
        return {first[pool.name]: pool.stats for pool in pools if pool.name in first}
