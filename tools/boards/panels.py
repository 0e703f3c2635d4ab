"""Boards and panels in few words, over Grafana's SDK.

A panel says what it shows and what to do when that looks bad; its unit is one of Grafana's names.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from grafana_foundation_sdk.builders import bargauge, common, dashboard, stat, table, timeseries
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models.common import (
    BarGaugeDisplayMode,
    BigValueColorMode,
    BigValueGraphMode,
    GraphDrawStyle,
    GraphTresholdsStyleMode,
    LegendDisplayMode,
    LegendPlacement,
    ScaleDistribution,
    StackingMode,
    TooltipDisplayMode,
    VizOrientation,
)
from grafana_foundation_sdk.models.dashboard import Dashboard as Model
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLink,
    DashboardLinkType,
    DataSourceRef,
    DataTransformerConfig,
    FieldColorModeId,
    Threshold,
    ThresholdsMode,
    VariableOption,
    VariableRefresh,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from tools.boards.queries import Query

TAG = "penstock"
RUNBOOKS = "docs/runbooks"  # as the alerts have it; the chart puts prometheusRule.runbookUrl there
COLUMNS = 24
_SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
_COLORS = ("green", "yellow", "red")
_ALL = VariableOption(selected=True, text="All", value="$__all")

AnyPanel = timeseries.Panel | stat.Panel | bargauge.Panel | table.Panel


class Look(Enum):
    """Ways to draw the values of a panel."""

    LINES = "lines"
    STACK = "stack"
    BARS = "bars"  # of how often something happened
    LOGARITHMIC = "logarithmic"
    FIGURE = "figure"  # the latest value, large
    GAUGE = "gauge"  # the latest values as horizontal bars
    TABLE = "table"  # the labels of the latest values


@dataclass(frozen=True)
class Panel:
    """One panel. `limits`: from where values are worth a look, and from where they are bad."""

    title: str
    unit: str
    shows: str
    act: str
    queries: Sequence[Query]
    look: Look = Look.LINES
    limits: tuple[float, ...] = ()
    runbook: str = ""  # name of an alert
    board: str = ""  # uid of the board to read on
    is_share: bool = False  # from 0 to 1


@dataclass(frozen=True)
class Row:
    """Panels side by side, of equal width."""

    title: str
    panels: Sequence[Panel]
    height: int = 8
    columns: int = 3


@dataclass(frozen=True)
class Board:
    """One board; `name` is its file's."""

    name: str
    title: str
    description: str
    rows: Sequence[Row]

    @property
    def uid(self) -> str:
        """Its address in Grafana."""
        return uid(self.name)


def uid(name: str) -> str:
    """The address of a board by its name."""
    return f"penstock-{name}"


def model(board: Board) -> Model:
    """The board as Grafana imports it."""
    made = (
        dashboard.Dashboard(f"Penstock / {board.title}")
        .uid(board.uid)
        .description(board.description)
        .tags([TAG])
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .refresh("30s")
        .time("now-1h", "now")
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(
            dashboard.QueryVariable("namespace")
            .label("Namespace")
            .datasource(_SOURCE)
            .query("label_values(penstock_bus_up, namespace)")
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .multi(True)
            .include_all(True)
            # Matches series without the label too: those of one machine.
            .all_value(".*")
            .current(_ALL)
        )
        .with_variable(
            dashboard.TextBoxVariable("runbooks")
            .label("Address of runbooks")
            .default_value(RUNBOOKS)
            .current(VariableOption(selected=True, text=RUNBOOKS, value=RUNBOOKS))
        )
        .link(
            dashboard.DashboardLink("Penstock")
            .type(DashboardLinkType.DASHBOARDS)
            .tags([TAG])
            .include_vars(True)
            .keep_time(True)
        )
    )
    number = 0
    for row in board.rows:
        made = made.with_row(dashboard.Row(row.title).id(number := number + 1))
        for panel in row.panels:
            builder = _panel(panel, (number := number + 1))
            made = made.with_panel(builder.span(COLUMNS // row.columns).height(row.height))
    return made.build()


def _panel(panel: Panel, number: int) -> AnyPanel:
    made = _empty(panel)
    made = made.id(number).title(panel.title).datasource(_SOURCE).unit(panel.unit)
    made = made.description(f"{panel.shows}\n\n**When it looks bad:** {panel.act}").links(_links(panel))
    if panel.limits:
        made = made.thresholds(_limits(panel.limits))
    if panel.unit in ("percentunit", "short", "none") or panel.is_share:
        made = made.min(0)
    if panel.is_share:
        made = made.max(1)
    is_now = panel.look in (Look.FIGURE, Look.GAUGE, Look.TABLE)
    for index, query in enumerate(panel.queries):
        asked = Dataquery().expr(query.expr).legend_format(query.legend).ref_id(chr(ord("A") + index))
        asked = asked.datasource(_SOURCE)
        if panel.look is Look.TABLE:
            asked = asked.format(PromQueryFormat.TABLE)
        # A figure has a small line below it; other panels of now need one value.
        asked = asked.instant() if is_now and panel.look is not Look.FIGURE else asked.range()
        made = made.with_target(asked)
    return made


def _empty(panel: Panel) -> AnyPanel:
    if panel.look is Look.FIGURE:
        return (
            stat.Panel()
            .color_mode(BigValueColorMode.VALUE if panel.limits else BigValueColorMode.NONE)
            .graph_mode(BigValueGraphMode.AREA)
            .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
            .color_scheme(_color(panel))
        )
    if panel.look is Look.GAUGE:
        return (
            bargauge.Panel()
            .orientation(VizOrientation.HORIZONTAL)
            .display_mode(BarGaugeDisplayMode.BASIC)
            .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
            .color_scheme(_color(panel))
            .min(0)
        )
    if panel.look is Look.TABLE:
        hidden = dict.fromkeys(["Time", "Value", "__name__", "job", "endpoint", "container"], True)
        return table.Panel().transformations([DataTransformerConfig("organize", options={"excludeByName": hidden})])
    return _curves(panel)


def _curves(panel: Panel) -> timeseries.Panel:
    made = (
        timeseries.Panel()
        .legend(
            common.VizLegendOptions()
            .show_legend(True)
            .display_mode(LegendDisplayMode.LIST)
            .placement(LegendPlacement.BOTTOM)
            .calcs([])
        )
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
        .line_width(1)
    )
    if panel.limits:
        made = made.thresholds_style(common.GraphThresholdsStyleConfig().mode(GraphTresholdsStyleMode.DASHED))
    if panel.look is Look.STACK:
        return made.stacking(common.StackingConfig().mode(StackingMode.NORMAL)).fill_opacity(40)
    if panel.look is Look.BARS:
        return made.draw_style(GraphDrawStyle.BARS).fill_opacity(60)
    if panel.look is Look.LOGARITHMIC:
        return made.scale_distribution(common.ScaleDistributionConfig().type(ScaleDistribution.LOG).log(10))
    return made


def _color(panel: Panel) -> dashboard.FieldColor:
    mode = FieldColorModeId.THRESHOLDS if panel.limits else FieldColorModeId.PALETTE_CLASSIC
    return dashboard.FieldColor().mode(mode)


def _limits(limits: Sequence[float]) -> dashboard.ThresholdsConfig:
    colors = _COLORS[1:] if len(limits) > 1 else _COLORS[2:]
    steps = [Threshold(None, _COLORS[0]), *(Threshold(each, color) for each, color in zip(limits, colors, strict=True))]
    return dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps)


def _links(panel: Panel) -> list[Builder[DashboardLink]]:
    found: list[Builder[DashboardLink]] = []
    if panel.board:
        url = f"/d/{uid(panel.board)}?${{datasource:queryparam}}&${{namespace:queryparam}}&${{__url_time_range}}"
        found.append(dashboard.DashboardLink(f"Board {panel.board}").type(DashboardLinkType.LINK).url(url))
    if panel.runbook:
        found.append(
            dashboard.DashboardLink(f"Runbook {panel.runbook}")
            .type(DashboardLinkType.LINK)
            .url(f"${{runbooks}}/{panel.runbook}.md")
            .target_blank(True)
        )
    return found
