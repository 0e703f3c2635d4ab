"""Panels of boards as matplotlib draws them: curves, figures, horizontal bars and tables."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite

import numpy as np
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.rig.boards import Panel
from bench.rig.prometheus import Series

INK, EDGE = "#1f2430", "#d6d9e0"
_FAINT = "#6b7280"
_LINES = (
    *("#3274d9", "#ff780a", "#56a64b", "#e02f44", "#a352cc", "#e0b400", "#37872d", "#8f3bb8", "#1f60c4", "#fa6400"),
)
_LIMITS = {"green": "#37872d", "yellow": "#c99700", "red": "#d0253b"}
_MAX_TICKS = 8
_MAX_LEGEND = 10
_LEGEND_COLUMNS = 3
_WIDE = 1000.0  # from where decades are enough for a logarithmic axis
_TABLE_ROWS = 6
_HIDDEN = ("__name__", "job", "namespace")
_PREFIXES = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
_SUFFIXES = {"reqps": " req/s", "ops": " /s", "mps": " msg/s", "bytes": "B"}

Found = list[tuple[str, Series]]  # what each series is called


@dataclass(frozen=True)
class Span:
    """The time that is drawn, unix seconds."""

    start_s: float
    end_s: float
    step_s: float
    rate_interval: str


@dataclass(frozen=True)
class Box:
    """The place of a panel, in parts of its figure."""

    left: float
    bottom: float
    width: float
    height: float

    def axes(self, figure: Figure, left: float, bottom: float, top: float, right: float) -> Axes:
        """Axes in it, with so many inches left free on each side."""
        width_in, height_in = figure.get_size_inches()
        axes = figure.add_axes(
            (
                self.left + left / width_in,
                self.bottom + bottom / height_in,
                self.width - (left + right) / width_in,
                self.height - (bottom + top) / height_in,
            )
        )
        axes.set_facecolor("none")
        return axes


def _curves(figure: Figure, panel: Panel, found: Found, box: Box, span: Span) -> None:
    shown = [(name, series) for name, series in found if series.points]
    num_rows = -(-min(len(shown), _MAX_LEGEND) // _LEGEND_COLUMNS)
    axes = box.axes(figure, 0.5, 0.28 + 0.15 * num_rows, 0.3, 0.15)
    if panel.options.get("stacking", {}).get("mode") == "normal":
        _stack(axes, shown)
    else:
        _lines(axes, shown, panel)
    _value_axis(axes, shown, panel)
    _time_axis(axes, span)
    axes.tick_params(labelsize=6.5, colors=_FAINT, length=0)
    axes.grid(color=EDGE, linewidth=0.5)
    for spine in axes.spines.values():
        spine.set_visible(False)
    if not shown:
        _nothing(axes)
        return
    handles, names = axes.get_legend_handles_labels()
    axes.legend(
        handles[:_MAX_LEGEND],
        names[:_MAX_LEGEND],
        loc="lower left",
        bbox_to_anchor=(box.left + 0.005, box.bottom + 0.002),
        bbox_transform=figure.transFigure,
        ncols=_LEGEND_COLUMNS,
        fontsize=6.5,
        frameon=False,
        labelcolor=INK,
        handlelength=1.2,
        columnspacing=1.0,
        borderaxespad=0,
    )


def _is_logarithmic(panel: Panel) -> bool:
    return bool(panel.options.get("scaleDistribution", {}).get("type") == "log")


def _lines(axes: Axes, shown: Found, panel: Panel) -> None:
    is_log, is_bars = _is_logarithmic(panel), panel.options.get("drawStyle") == "bars"
    for index, (name, series) in enumerate(shown):
        times = [at for at, _ in series.points]
        values = [value if isfinite(value) and (value > 0 or not is_log) else np.nan for _, value in series.points]
        color = _LINES[index % len(_LINES)]
        if is_bars:
            axes.fill_between(times, values, step="mid", color=color, alpha=0.3, linewidth=0)
        axes.plot(times, values, label=name, color=color, linewidth=1.1, drawstyle="steps-mid" if is_bars else None)


def _stack(axes: Axes, shown: Found) -> None:
    times = sorted({at for _, series in shown for at, _ in series.points})
    below = np.zeros(len(times))
    for index, (name, series) in enumerate(shown):
        values = dict(series.points)
        top = below + np.array([values.get(at, 0.0) for at in times])
        color = _LINES[index % len(_LINES)]
        axes.fill_between(times, below, top, color=color, alpha=0.4, linewidth=0)
        axes.plot(times, top, color=color, linewidth=0.9, label=name)
        below = top


def _value_axis(axes: Axes, shown: Found, panel: Panel) -> None:
    if _is_logarithmic(panel):
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        if high / low < _WIDE:
            axes.yaxis.set_major_locator(ticker.LogLocator(10, subs=(1, 2, 5)))
    else:
        is_zero = not any(value for _, series in shown for _, value in series.points)
        top = max((limit for limit, _ in panel.limits), default=0.8) * 1.25 if is_zero else axes.get_ylim()[1] * 1.05
        axes.set_ylim(0, top)
        axes.yaxis.set_major_locator(ticker.MaxNLocator(5))
        low, high = axes.get_ylim()
    for value, color in panel.limits:
        if low <= value <= high * 2:
            axes.axhline(value, color=_LIMITS[color], linewidth=0.8, linestyle="--")
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: _text(value, panel.unit)))


def _time_axis(axes: Axes, span: Span) -> None:
    """The same time in all panels, with the minutes since its beginning."""
    seconds = span.end_s - span.start_s
    step_s = next(each for each in (60, 120, 300, 600, 1800, 3600) if seconds <= each * _MAX_TICKS)
    ticks = np.arange(span.start_s, span.end_s + 1, step_s)
    axes.set_xlim(span.start_s, span.end_s)
    axes.set_xticks(ticks, [f"{(tick - span.start_s) / 60:.0f} min" for tick in ticks])
    axes.minorticks_off()


def _figure(figure: Figure, panel: Panel, found: Found, box: Box, _: Span) -> None:
    axes = box.axes(figure, 0.0, 0.0, 0.28, 0.0)
    axes.set_axis_off()
    points = next((series.points for _, series in found if series.points), None)
    if points is None:
        _nothing(axes)
        return
    value, color = points[-1][1], INK
    if panel.limits:
        color = next((_LIMITS[name] for limit, name in reversed(panel.limits) if value >= limit), _LIMITS["green"])
    axes.text(0.5, 0.62, _text(value, panel.unit), size=17, weight="bold", color=color, ha="center", va="center")
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    heights = np.array([each for _, each in points])
    if heights.max() > 0:
        line = heights / heights.max() * 0.28
        axes.fill_between(np.linspace(0, 1, len(line)), 0, line, color=color, alpha=0.2, linewidth=0)


def _gauge(figure: Figure, panel: Panel, found: Found, box: Box, _: Span) -> None:
    shown = [(name, series.points[-1][1]) for name, series in found if series.points]
    longest = max((len(name) for name, _ in shown), default=0)
    axes = box.axes(figure, 0.15 + 0.058 * longest, 0.08, 0.32, 0.6)
    axes.set_axis_off()
    if not shown:
        _nothing(axes)
        return
    most = max(value for _, value in shown) or 1.0
    places = range(len(shown))[::-1]
    axes.barh(places, [value / most for _, value in shown], height=0.7, color=_LINES[: len(shown)])
    axes.set_xlim(0, 1)
    for place, (name, value) in zip(places, shown, strict=True):
        axes.text(-0.01, place, name, size=7, ha="right", va="center", color=INK)
        axes.text(value / most + 0.01, place, _text(value, panel.unit), size=7, va="center", color=INK)


def _table(figure: Figure, _: Panel, found: Found, box: Box, __: Span) -> None:
    axes = box.axes(figure, 0.1, 0.1, 0.35, 0.1)
    axes.set_axis_off()
    if not found:
        _nothing(axes)
        return
    rows = [series.labels for _, series in found[:_TABLE_ROWS]]
    names = [name for name in dict.fromkeys(name for labels in rows for name in labels) if name not in _HIDDEN]
    for column, name in enumerate(names):
        axes.text(column / len(names), 0.95, name, size=7, weight="bold", color=_FAINT, va="top")
        for row, labels in enumerate(rows, 1):
            axes.text(column / len(names), 0.95 - row * 0.17, labels.get(name, ""), size=7, color=INK, va="top")


def _nothing(axes: Axes) -> None:
    axes.text(0.5, 0.5, "no data", size=8, color=_FAINT, ha="center", va="center", transform=axes.transAxes)


def _text(value: float, unit: str) -> str:
    """A value as Grafana writes it."""
    if unit == "percentunit":
        return f"{value * 100:.3g} %"
    if unit == "s":
        scale, name = next(
            (each for each in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")) if abs(value) >= each[0]), (1.0, "s")
        )
        return f"{value / scale:.3g} {name}"
    scale, prefix = next((each for each in _PREFIXES if abs(value) >= each[0]), (1.0, ""))
    return f"{value / scale:.3g}{' ' if unit == 'bytes' else ''}{prefix}{_SUFFIXES.get(unit, '')}"


DRAWN: Mapping[str, Callable[[Figure, Panel, Found, Box, Span], None]] = {
    "timeseries": _curves,
    "stat": _figure,
    "bargauge": _gauge,
    "table": _table,
}
