"""A process's counts of its hold on the pool, and the times until the server answers: alike in all services."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from servicekit.bus.call_times import CallTimes
from servicekit.metric_families import CounterFamily, Family, GaugeFamily, HistogramFamily


class Loss(Enum):
    """The reason why a process had to come back to its pool."""

    UNREACHABLE = "unreachable"  # the server was gone or silent
    SUSPENDED = "suspended"  # the server was restarted; the session goes on
    FENCED = "fenced"  # what the session held is others', a new one was begun


BUS_UP = GaugeFamily(
    "penstock_bus_up", "Whether this process is connected to Redis and its session is active: 1 or 0.", {"pool": ()}
)
SESSION_LOSSES = CounterFamily(
    "penstock_session_losses_total",
    "Times that this process lost its hold on the pool: unreachable: Redis was gone or silent; suspended: Redis was "
    "restarted; fenced: a new session was begun, as its lease had run out or, of schedulers, as Redis was restarted.",
    {"pool": (), "reason": tuple(each.value for each in Loss)},
)
BUS_CALL = HistogramFamily(
    "penstock_bus_call_seconds",
    "Time from the write of a call to Redis until its answer; of several calls in one write, as `batch`, until the "
    "first answer. Reads that wait for entries are not among them.",
    {"pool": (), "call": ()},
)
POOL_FAMILIES: tuple[Family, ...] = (BUS_UP, SESSION_LOSSES, BUS_CALL)


@dataclass(slots=True)
class PoolStats:
    """Counts since the start of the process. One thread writes; any thread may read."""

    is_up: bool = False  # connected, and the session is active
    losses: Counter[Loss] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Hold:
    """A process's hold on one pool."""

    pool: str
    stats: PoolStats
    call_times: CallTimes


class PoolCollector(Collector):
    """`penstock_bus_*` and `penstock_session_losses_total`, read at each scrape."""

    def __init__(self, holds: Callable[[], Iterable[Hold]]) -> None:
        """`holds` are those that the process has at the moment."""
        self._holds = holds

    def collect(self) -> Iterator[Metric]:
        """Called at each scrape."""
        holds = tuple(self._holds())
        yield BUS_UP.by({each.pool: float(each.stats.is_up) for each in holds})
        yield SESSION_LOSSES.by({(each.pool, loss.value): each.stats.losses[loss] for each in holds for loss in Loss})
        yield BUS_CALL.by(
            {(each.pool, call): times for each in holds for call, times in each.call_times.by_call().items()}
        )
