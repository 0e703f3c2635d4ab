"""PromQL of the boards: series of the chosen namespaces, their rates and quantiles."""

import re
from dataclasses import dataclass

PROCESS = "namespace, pod, instance, process"  # what tells processes apart, wherever they run
OF_PROCESS = "{{pod}} {{process}} {{instance}}"
RATE = "$__rate_interval"
RARE = "5m"  # for what seldom happens: an event stays to be seen for so long

_MATCHER = re.compile(r"(=~|=)([^,]+)")


@dataclass(frozen=True)
class Query:
    """An expression, and what its series are called."""

    expr: str
    legend: str


def series(metric: str, where: str = "") -> str:
    """The series of a metric in the chosen namespaces. `where`: more labels without quotes: `state=alive, kind=x`."""
    return metric + "{" + _MATCHER.sub(r'\1"\2"', ", ".join(filter(None, ("namespace=~$namespace", where)))) + "}"


def rate(metric: str, by: str = "", where: str = "", *, window: str = RATE) -> str:
    """The growth of counters together, a second."""
    return _sum(f"rate({series(metric, where)}[{window}])", by)


def events(metric: str, by: str = "", where: str = "") -> str:
    """The number of rare events in the last minutes."""
    return _sum(f"increase({series(metric, where)}[{RARE}])", by)


def total(metric: str, by: str = "", where: str = "") -> str:
    """The sum of what each process tells of itself."""
    return _sum(series(metric, where), by)


def largest(metric: str, by: str = "", where: str = "") -> str:
    """The maximum: of what all gateways tell of the same pool, or of processes where the worst one counts."""
    return f"max{_by(by)}({series(metric, where)})"


def quantile(level: float, histogram: str, by: str = "", where: str = "", *, window: str = RATE) -> str:
    """A quantile of what was observed lately, over all processes."""
    labels = f"{by}, le" if by else "le"
    return f"histogram_quantile({level:g}, {rate(f'{histogram}_bucket', labels, where, window=window)})"


def quantiles(histogram: str, *levels: float) -> tuple[Query, ...]:
    """Several quantiles of one histogram."""
    return tuple(Query(quantile(level, histogram), f"p{level * 100:g}") for level in levels or (0.5, 0.95, 0.99))


def of_ours(expr: str) -> str:
    """A metric that every Python process has, of Penstock's processes."""
    return f"{expr} and on ({PROCESS}) {series('penstock_bus_up')}"


def starts(by: str = "") -> str:
    """The number of processes that were started anew in the last minutes."""
    return _sum(of_ours(f"changes({series('process_start_time_seconds')}[{RARE}])"), by)


def _sum(expr: str, by: str) -> str:
    return f"sum{_by(by)}({expr})"


def _by(labels: str) -> str:
    return f" by ({labels}) " if labels else ""
