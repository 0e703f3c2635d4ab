"""The boards of deploy/grafana, as Grafana reads them from their files."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "deploy" / "grafana"


@dataclass(frozen=True)
class Target:
    """One query of a panel."""

    expr: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """One panel, or the head of a row (`kind` is "row")."""

    title: str
    kind: str
    unit: str
    description: str
    x: int
    y: int
    width: int
    height: int
    targets: tuple[Target, ...]
    limits: tuple[tuple[float, str], ...]  # from where, and the color
    options: Mapping[str, Any]  # of curves: fieldConfig.defaults.custom

    def overlaps(self, other: "Panel") -> bool:
        """Return whether both cover a place."""
        return (
            self.x < other.x + other.width
            and other.x < self.x + self.width
            and self.y < other.y + other.height
            and other.y < self.y + self.height
        )


@dataclass(frozen=True)
class Board:
    """One board; `name` is its file's."""

    name: str
    title: str
    panels: tuple[Panel, ...]
    content: Mapping[str, Any]


def read_boards() -> list[Board]:
    """All of them, in the order of their files' names."""
    return [_board(path) for path in sorted(FOLDER.glob("*.json"))]


def fill_in(expr: str, *, namespace: str = ".*", rate_interval: str = "1m") -> str:
    """The query with the variables' values, as Grafana sends it."""
    return expr.replace("$namespace", namespace).replace("$__rate_interval", rate_interval)


def _board(path: Path) -> Board:
    content = json.loads(path.read_text("utf-8"))
    return Board(path.stem, content["title"], tuple(_panel(each) for each in content["panels"]), content)


def _panel(content: Mapping[str, Any]) -> Panel:
    place, defaults = content["gridPos"], content.get("fieldConfig", {}).get("defaults", {})
    steps = defaults.get("thresholds", {}).get("steps", [])
    return Panel(
        title=content["title"],
        kind=content["type"],
        unit=defaults.get("unit", ""),
        description=content.get("description", ""),
        x=place.get("x", 0),
        y=place["y"],
        width=place["w"],
        height=place["h"],
        targets=tuple(Target(each["expr"], each["legendFormat"]) for each in content.get("targets", [])),
        limits=tuple((step["value"], step["color"]) for step in steps if step["value"] is not None),
        options=defaults.get("custom", {}),
    )
