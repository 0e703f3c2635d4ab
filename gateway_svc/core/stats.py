"""Counts of a gateway: plain numbers that the shell turns into metrics."""

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

from contract.domain.histogram import Histogram

# Upper bounds in seconds: 1 ms to 10 min.
BOUNDS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 600.0,
)  # fmt: skip


class Outcome(Enum):
    """The end of a request as its client sees it."""

    STOP = "stop"
    LENGTH = "length"
    REPETITION = "repetition"  # an output repeated itself
    POOLED = "pooled"  # nothing was to be generated
    CANCELLED = "cancelled"
    ERROR = "error"  # nobody's or the operator's fault
    REJECTED = "rejected"  # the caller's fault, or turned away


def _latencies() -> Histogram:
    return Histogram(BOUNDS_S)


MAX_TENANTS = 1000  # that are counted by name; of all others together
OTHERS = "other"


@dataclass(slots=True)
class TenantTokens:
    """Tokens of one tenant."""

    num_prompt: int = 0  # of requests whose first text was handed out
    num_output: int = 0  # handed out


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """The load of all schedulers together."""

    num_running: int = 0  # sequences with a slot
    num_used_blocks: int = 0
    num_blocks: int = 0  # KV blocks of their workers

    @property
    def kv_usage(self) -> float:
        """The used part of the KV blocks, 0 to 1."""
        return self.num_used_blocks / self.num_blocks if self.num_blocks else 0.0


@dataclass(slots=True)
class GatewayStats:
    """Counts since the start and figures of now."""

    outcomes: Counter[Outcome] = field(default_factory=Counter)
    time_to_first_token: Histogram = field(default_factory=_latencies)  # seconds, as the next two
    inter_token_latency: Histogram = field(default_factory=_latencies)
    e2e_request_latency: Histogram = field(default_factory=_latencies)
    num_streams: int = 0  # requests being served
    num_rows: int = 0  # text rows accepted
    num_tokens: int = 0  # output tokens in them
    num_duplicate_rows: int = 0  # brought nothing new
    num_gap_rows: int = 0  # text before them is missing: asked for again
    num_unknown_rows: int = 0  # of requests that are not served here (any more)
    num_attaches: int = 0  # times that text was asked for again
    num_resumes: int = 0  # times that a client came back to requests that were there
    num_detached: int = 0  # calls whose client is gone and may come back
    num_slow_clients: int = 0  # times that a client was so slow that its text was left where it is kept
    num_dead_letters: int = 0  # entries of `text` that could not be read
    num_key_reloads: int = 0  # times that the file of API keys was read, the start included
    num_broken_key_reloads: int = 0  # times that it had changed and could not be used
    num_pool_reloads: int = 0  # times that the file of pools was read and is in use, the start included
    num_broken_pool_reloads: int = 0  # times that it had changed and could not be used
    num_waiting: int = 0  # requests of the pool that wait for their first slot
    num_waiting_tokens: int = 0  # of their prompts
    expected_wait_s: float = 0.0  # until all of them have started
    sessions: dict[tuple[str, str], int] = field(default_factory=dict)  # of the pool, by kind and state
    survey: Histogram = field(default_factory=_latencies)  # seconds until the pool's members were told
    models: tuple[tuple[str, str], ...] = ()  # names and digests of what is served
    load: PoolLoad = PoolLoad()  # only if somebody wants to know
    redis_used_bytes: int = 0  # of memory
    redis_max_bytes: int = 0  # 0: no bound
    redis_persists: bool = False
    redis_persistence_ok: bool = True
    kv_blocks: dict[int, int] = field(default_factory=dict)  # of living workers, by tokens of a block
    tenants: dict[str, TenantTokens] = field(default_factory=dict)  # by name
    queue_depths: dict[str, int] = field(default_factory=dict)  # by stream: prompts, requests, dead

    def of_tenant(self, name: str) -> TenantTokens:
        """The counts of a tenant; the first thousand have their own."""
        known = self.tenants.get(name)
        if known is None:
            name = name if len(self.tenants) < MAX_TENANTS else OTHERS
            known = self.tenants.setdefault(name, TenantTokens())
        return known
