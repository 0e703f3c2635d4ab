"""What is told of a run: a table, a file, a plot."""

import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from contract.domain.errors import ErrorCode, PenstockError
from penstock.benchmark import measures
from penstock.benchmark.measures import METRICS, Times
from penstock.benchmark.stream import Outcome

_TOTALS = {
    "completed": "Successful requests",
    "failed": "Failed requests",
    "duration": "Benchmark duration (s)",
    "total_input_tokens": "Total input tokens",
    "total_output_tokens": "Total generated tokens",
    "request_throughput": "Request throughput (req/s)",
    "request_goodput": "Request goodput (req/s)",
    "output_throughput": "Output token throughput (tok/s)",
    "total_token_throughput": "Total token throughput (tok/s)",
    "max_concurrent_requests": "Requests at once, at most",
}


def show(figures: Mapping[str, Any]) -> None:
    """Prints the figures."""
    table = Table.grid(padding=(0, 3))
    for name, title in _TOTALS.items():
        if figures[name] is not None:
            table.add_row(title, _number(figures[name]))
    for metric, title in METRICS.items():
        told = {name: value for name, value in figures.items() if name.endswith(f"_{metric}_ms") and value is not None}
        if told:
            table.add_row(f"[dim]{title}[/dim]")
        for name, value in told.items():
            table.add_row(f"{name.partition('_')[0].capitalize()} {metric.upper()} (ms)", _number(value))
    Console().print(table)


def save(path: Path, figures: Mapping[str, Any], setting: Mapping[str, Any], outcomes: Sequence[Outcome]) -> None:
    """Writes the setting and the figures as JSON, and what became of each request.

    Raises:
        PenstockError: the file cannot be written.
    """
    good = [each for each in outcomes if not each.error]
    times = [Times.of(each) for each in good]
    detail = {
        "input_lens": [each.prompt_tokens for each in good],
        "output_lens": [each.output_tokens for each in good],
        "ttfts": [each.ttft / 1e3 for each in times],
        "itls": [[gap / 1e3 for gap in each.itl] for each in times],
        "errors": [each.error for each in outcomes if each.error],
    }
    try:
        path.write_text(json.dumps({**setting, **figures, **detail}, indent=1), "utf-8")
    except OSError as error:
        raise PenstockError(ErrorCode.INTERNAL, f"{path} cannot be written: {error}") from error


def check_plot(path: Path) -> None:
    """Make sure that a plot can be drawn, before hours are spent on what it shows.

    Raises:
        PenstockError: matplotlib is missing, or there is no such folder.
    """
    if find_spec("matplotlib") is None:
        raise PenstockError(
            ErrorCode.INTERNAL, "--plot needs matplotlib: install penstock[pictures], or leave --plot out"
        )
    if not path.parent.is_dir():
        raise PenstockError(ErrorCode.INTERNAL, f"--plot {path}: there is no folder {path.parent}")


def plot(path: Path, figures: Mapping[str, Any], outcomes: Sequence[Outcome]) -> None:
    """Draws the share of requests within each time, and what was going on when."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  (an extra)
    from matplotlib.figure import Figure  # noqa: PLC0415

    good = [each for each in outcomes if not each.error]
    times = [Times.of(each) for each in good]
    figure = Figure(figsize=(11, 7), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(
        f"{figures['completed']} requests, {figures['request_throughput']:.2f} requests/s, "
        f"{figures['output_throughput']:.0f} tokens/s"
    )
    first, gaps, running, speed = figure.subplots(2, 2).flat
    _distribution(first, "time to the first token", [each.ttft for each in times])
    _distribution(gaps, "between two tokens", [gap for each in times for gap in each.itl])
    begin_s = min((each.sent_s for each in outcomes), default=0.0)
    changes = measures.changes(outcomes)
    running.step([at - begin_s for at, _ in changes], np.cumsum([change for _, change in changes]), where="post")
    running.set(title="requests at once", xlabel="seconds", ylim=(0, None))
    told = [at - begin_s for each in good for at in each.told_s]
    counts, edges = np.histogram(told, bins=max(1, min(120, round(figures["duration"] * 4))))
    speed.stairs(counts / np.diff(edges), edges)
    speed.set(title="events with tokens a second", xlabel="seconds", ylim=(0, None))
    figure.savefig(path, dpi=110)


def _distribution(axes: Any, title: str, values: Sequence[float]) -> None:
    ordered = np.sort(values)
    axes.plot(ordered, np.arange(1, len(ordered) + 1) / max(1, len(ordered)))
    axes.set(title=f"{title}: share within", xlabel="milliseconds", ylim=(0, 1), xlim=(0, None))
    axes.grid(alpha=0.3)


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"
