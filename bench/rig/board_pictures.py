"""Pictures of boards: each panel where Grafana puts it, with its title, unit and legend, drawn from a Prometheus."""

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL.Image import Quantize, fromarray

from bench.rig.boards import Board, Panel, fill_in
from bench.rig.panel_pictures import DRAWN, EDGE, INK, Box, Found, Span
from bench.rig.prometheus import Prometheus

_WIDTH_IN, _ROW_IN, _HEAD_IN, _DPI = 15.0, 0.34, 0.4, 80
_COLUMNS = 24
_GROUND = "#eef0f3"
_UNITS = {
    "s": "seconds",
    "percentunit": "%",
    "bytes": "bytes",
    "reqps": "requests/s",
    "ops": "per second",
    "mps": "messages/s",
}


def draw(board: Board, prometheus: Prometheus, span: Span, path: Path) -> list[str]:
    """Writes the picture of a board; the titles of panels that have nothing to show."""
    height_in = max(panel.y + panel.height for panel in board.panels) * _ROW_IN + _HEAD_IN
    figure = Figure(figsize=(_WIDTH_IN, height_in), dpi=_DPI, facecolor=_GROUND)
    canvas = FigureCanvasAgg(figure)
    figure.text(0.006, 1 - 0.26 / height_in, board.title, size=13, weight="bold", color=INK)
    empty = []
    for panel in board.panels:
        box = _box(panel, height_in)
        if panel.kind == "row":
            figure.text(box.left + 0.003, box.bottom, panel.title, size=10, weight="bold", color=INK)
            continue
        found = _ask(panel, prometheus, span)
        if not any(series.points for _, series in found):
            empty.append(panel.title)
        _frame(figure, panel, box)
        DRAWN[panel.kind](figure, panel, found, box, span)
    canvas.draw()
    # A palette is enough for lines and text, and keeps the files small.
    picture = fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    picture.quantize(256, Quantize.FASTOCTREE).save(path, optimize=True)
    return empty


def _box(panel: Panel, height_in: float) -> Box:
    gap_in = 0.03
    height = panel.height * _ROW_IN / height_in
    top = 1 - (_HEAD_IN + panel.y * _ROW_IN) / height_in
    return Box(
        panel.x / _COLUMNS + gap_in / _WIDTH_IN,
        top - height + gap_in / height_in,
        panel.width / _COLUMNS - 2 * gap_in / _WIDTH_IN,
        height - 2 * gap_in / height_in,
    )


def _ask(panel: Panel, prometheus: Prometheus, span: Span) -> Found:
    found: Found = []
    for target in panel.targets:
        query = fill_in(target.expr, rate_interval=span.rate_interval)
        if panel.kind in ("bargauge", "table"):
            series = prometheus.now(query, span.end_s)
        else:
            series = prometheus.range(query, span.start_s, span.end_s, span.step_s)
        found += [(_name(target.legend, each.labels), each) for each in series]
    return found


def _name(legend: str, labels: Mapping[str, str]) -> str:
    return " ".join(re.sub(r"{{(\w+)}}", lambda match: labels.get(match[1], ""), legend).split())


def _frame(figure: Figure, panel: Panel, box: Box) -> None:
    place, size = (box.left, box.bottom), (box.width, box.height)
    figure.add_artist(
        Rectangle(place, *size, facecolor="white", edgecolor=EDGE, transform=figure.transFigure, zorder=-1)
    )
    unit = f"  ({_UNITS[panel.unit]})" if panel.kind == "timeseries" and panel.unit in _UNITS else ""
    top = box.bottom + box.height - 0.17 / figure.get_size_inches()[1]
    figure.text(box.left + 0.005, top, panel.title + unit, size=8, weight="bold", color=INK)
