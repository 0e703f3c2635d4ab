"""A gateway's counts as Prometheus metrics."""

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from contract import __version__
from gateway_svc.core.stats import GatewayStats, Outcome
from gateway_svc.pools import Pools
from servicekit.bus.calls import SessionKind
from servicekit.hops import hop_families
from servicekit.metric_families import (
    CounterFamily,
    Family,
    GaugeFamily,
    HistogramFamily,
    Labels,
    dead_letters,
    model_info,
)
from servicekit.pool_stats import POOL_FAMILIES, Hold, PoolCollector

V = TypeVar("V")

_POOL: Labels = {"pool": ()}
REQUESTS = CounterFamily(
    "penstock_requests_total",
    "Requests that ended, by how. Of several pools, those that were turned away before theirs was known have none.",
    {**_POOL, "outcome": tuple(each.value for each in Outcome)},
)
QUEUE_DEPTH = GaugeFamily(
    "penstock_queue_depth", "Entries of a stream of the pool.", {**_POOL, "stream": ("prompts", "requests", "dead")}
)
WAITING_REQUESTS = GaugeFamily(
    "penstock_waiting_requests",
    "Requests of the pool that wait for their first slot; every gateway tells the same.",
    _POOL,
)
WAITING_TOKENS = GaugeFamily(
    "penstock_waiting_tokens",
    "Tokens of the prompts of those requests; of text, an estimate until it is tokenized.",
    _POOL,
)
EXPECTED_WAIT = GaugeFamily(
    "penstock_expected_wait_seconds",
    "Time in which all requests of the pool that wait for their first slot would start, at the rate of late; while "
    "nothing has started since the first of them came, for how long it has waited. Every gateway tells the same.",
    _POOL,
)
REDIS_USED_MEMORY = GaugeFamily(
    "penstock_redis_used_memory_bytes",
    "Memory that Redis uses, as a gateway asks every ten seconds.",
    _POOL,
)
REDIS_MAX_MEMORY = GaugeFamily(
    "penstock_redis_max_memory_bytes",
    "Memory beyond which Redis refuses writes (`maxmemory`); 0: no bound.",
    _POOL,
)
REDIS_PERSISTS = GaugeFamily("penstock_redis_persists", "Whether Redis keeps an append-only file: 1 or 0.", _POOL)
REDIS_PERSISTENCE_OK = GaugeFamily(
    "penstock_redis_persistence_ok",
    "Whether the last append, rewrite and snapshot of Redis succeeded: 1 or 0; 1 also where it keeps nothing.",
    _POOL,
)
SESSION_STATES = ("alive", "draining", "left", "dead")
SESSIONS = GaugeFamily(
    "penstock_sessions",
    "Processes of the pool, as this gateway knows them: dead: their lease has run out, or they have not come back yet "
    "after a restart of Redis; left: they ended in order. Those that are gone are told for a minute.",
    {**_POOL, "kind": tuple(each.value for each in SessionKind), "state": SESSION_STATES},
)
SURVEY = HistogramFamily(
    "penstock_survey_seconds",
    "Time in which a gateway learns which members of the pool have changed, once a second.",
    _POOL,
)
MODEL = model_info()
DEAD_LETTERS = dead_letters("text")
TEXT_ROWS = CounterFamily(
    "penstock_text_rows_total",
    "Text rows by what became of them: accepted; duplicate: they brought nothing new; gap: text before them was "
    "missing and was asked for again; unknown: their request is not served here any more.",
    {**_POOL, "result": ("accepted", "duplicate", "gap", "unknown")},
)
DELIVERED_TOKENS = CounterFamily("penstock_delivered_tokens_total", "Output tokens handed to clients.", _POOL)
TENANT_TOKENS = CounterFamily(
    "penstock_tenant_tokens_total",
    "Tokens of prompts (with the first text that is handed out) and of outputs handed to clients, for the first 1,000 "
    "tenants that are served, then for `other` together.",
    {**_POOL, "tenant": (), "kind": ("prompt", "output")},
)
TEXT_REFETCHES = CounterFamily(
    "penstock_text_refetches_total", "Times that the text of a request was asked for again.", _POOL
)
RESUMES = CounterFamily("penstock_resumes_total", "Times that a client came back to a request.", _POOL)
DETACHED_CALLS = GaugeFamily("penstock_detached_calls", "Calls that wait for their client to come back.", _POOL)
SLOW_CLIENTS = CounterFamily(
    "penstock_slow_clients_total",
    "Times that a client read so slowly that its text was left in the pool.",
    _POOL,
)
POOL_RELOADS = CounterFamily(
    "penstock_pool_reloads_total",
    "Readings of the file of pools; failure: it is wrong or gone, and the pools from before stay.",
    {"result": ("success", "failure")},
)
API_KEY_RELOADS = CounterFamily(
    "penstock_api_key_reloads_total",
    "Readings of the file of API keys; failure: it is wrong or gone, and the keys from before stay valid, of a file "
    "that is gone for a while.",
    {"result": ("success", "failure")},
)
OPEN_STREAMS = GaugeFamily("penstock_open_streams", "Requests being served.", _POOL)
TIME_TO_FIRST_TOKEN = HistogramFamily(
    "penstock_time_to_first_token_seconds",
    "Time from the arrival of a request to its first token, as its client sees it.",
    _POOL,
)
INTER_TOKEN_LATENCY = HistogramFamily(
    "penstock_inter_token_latency_seconds",
    "Time between tokens of one request, as its client sees it.",
    _POOL,
)
E2E_REQUEST_LATENCY = HistogramFamily(
    "penstock_e2e_request_latency_seconds",
    "Time from the arrival of a request to its end, of those that were answered.",
    _POOL,
)

FAMILIES: tuple[Family, ...] = (
    *POOL_FAMILIES,
    *hop_families("text"),
    *(REDIS_USED_MEMORY, REDIS_MAX_MEMORY, REDIS_PERSISTS, REDIS_PERSISTENCE_OK),
    *(EXPECTED_WAIT, SESSIONS, SURVEY, MODEL),
    *(REQUESTS, QUEUE_DEPTH, WAITING_REQUESTS, WAITING_TOKENS, DEAD_LETTERS, TEXT_ROWS, DELIVERED_TOKENS),
    *(
        TENANT_TOKENS,
        TEXT_REFETCHES,
        RESUMES,
        DETACHED_CALLS,
        SLOW_CLIENTS,
        POOL_RELOADS,
        API_KEY_RELOADS,
        OPEN_STREAMS,
    ),
    *(TIME_TO_FIRST_TOKEN, INTER_TOKEN_LATENCY, E2E_REQUEST_LATENCY),
)


class GatewayCollector(Collector):
    """`penstock_*` of a gateway, read at each scrape."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools
        self._holds = PoolCollector(lambda: [Hold(each.name, each.pool_stats, each.call_times) for each in pools.all])

    def collect(self) -> Iterator[Metric]:
        """Called at each scrape."""
        yield from self._holds.collect()
        stats = {pool.name: pool.stats for pool in self._pools.all}
        common = self._pools.stats
        outcomes = {**stats, "": common} if self._pools.are_named else stats
        yield REQUESTS.by(_by_pool(outcomes, lambda of: {each.value: of.outcomes[each] for each in Outcome}))
        yield QUEUE_DEPTH.among(pool=stats).by(_by_pool(stats, lambda of: of.queue_depths))
        yield WAITING_REQUESTS.by(_each(stats, lambda of: of.num_waiting))
        yield WAITING_TOKENS.by(_each(stats, lambda of: of.num_waiting_tokens))
        yield EXPECTED_WAIT.by(_each(stats, lambda of: of.expected_wait_s))
        yield REDIS_USED_MEMORY.by(_each(stats, lambda of: of.redis_used_bytes))
        yield REDIS_MAX_MEMORY.by(_each(stats, lambda of: of.redis_max_bytes))
        yield REDIS_PERSISTS.by(_each(stats, lambda of: float(of.redis_persists)))
        yield REDIS_PERSISTENCE_OK.by(_each(stats, lambda of: float(of.redis_persistence_ok)))
        yield SESSIONS.among(pool=stats).by(
            {(pool, kind, state): count for pool, of in stats.items() for (kind, state), count in of.sessions.items()}
        )
        yield SURVEY.by(_each(stats, lambda of: of.survey))
        models = sorted({each for of in stats.values() for each in of.models})
        yield MODEL.of(*((name, digest, __version__) for name, digest in models))
        yield DEAD_LETTERS.by({"text": sum(of.num_dead_letters for of in stats.values())})
        yield TEXT_ROWS.by(_by_pool(stats, _text_rows))
        yield DELIVERED_TOKENS.by(_each(stats, lambda of: of.num_tokens))
        yield TENANT_TOKENS.by(
            {
                (pool, name, kind): count
                for pool, of in stats.items()
                for name, tokens in list(of.tenants.items())
                for kind, count in (("prompt", tokens.num_prompt), ("output", tokens.num_output))
            }
        )
        yield TEXT_REFETCHES.by(_each(stats, lambda of: of.num_attaches))
        yield RESUMES.by(_each(stats, lambda of: of.num_resumes))
        yield DETACHED_CALLS.by(_each(stats, lambda of: of.num_detached))
        yield SLOW_CLIENTS.by(_each(stats, lambda of: of.num_slow_clients))
        yield POOL_RELOADS.by({"success": common.num_pool_reloads, "failure": common.num_broken_pool_reloads})
        yield API_KEY_RELOADS.by({"success": common.num_key_reloads, "failure": common.num_broken_key_reloads})
        yield OPEN_STREAMS.by(_each(stats, lambda of: of.num_streams))
        yield TIME_TO_FIRST_TOKEN.by(_each(stats, lambda of: of.time_to_first_token))
        yield INTER_TOKEN_LATENCY.by(_each(stats, lambda of: of.inter_token_latency))
        yield E2E_REQUEST_LATENCY.by(_each(stats, lambda of: of.e2e_request_latency))


def _each(stats: Mapping[str, GatewayStats], figure: Callable[[GatewayStats], V]) -> dict[str, V]:
    return {pool: figure(of) for pool, of in stats.items()}


def _by_pool(
    stats: Mapping[str, GatewayStats], figures: Callable[[GatewayStats], Mapping[str, float]]
) -> dict[tuple[str, ...], float]:
    """Figures with another label, each with the name of its pool before that."""
    return {(pool, key): value for pool, of in stats.items() for key, value in figures(of).items()}


def _text_rows(stats: GatewayStats) -> dict[str, float]:
    return {
        "accepted": stats.num_rows,
        "duplicate": stats.num_duplicate_rows,
        "gap": stats.num_gap_rows,
        "unknown": stats.num_unknown_rows,
    }
