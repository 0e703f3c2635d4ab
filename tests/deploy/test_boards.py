"""The boards of deploy/grafana: made by tools/boards, each panel explained, each query one that Prometheus reads."""

import re
import shutil
import subprocess
from itertools import combinations
from pathlib import Path

import pytest
import yaml
from prometheus_rules import RUNBOOKS, recorded

from bench.rig.boards import FOLDER, Board, Panel, fill_in, read_boards
from servicekit.metric_families import Family
from tools import generate_metrics
from tools.boards.__main__ import BOARDS, files

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "dashboards.md"
NAMES = ("overview", "pipeline", "scheduler", "worker", "reliability", "capacity")
# Prometheus' own, and those of every Python process.
FOREIGN = {
    "ALERTS": {"alertname", "alertstate"},
    "process_cpu_seconds_total": set(),
    "process_resident_memory_bytes": set(),
    "process_start_time_seconds": set(),
}
TARGET_LABELS = {"namespace", "pod", "instance", "process"}  # that Prometheus or `penstock serve` add
GRAFANAS_OWN = {"__rate_interval", "__url_time_range"}
MAX_PICTURE_BYTES = 200_000
SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)\{([^}]*)\}")
boards = read_boards()
panels = [
    pytest.param(panel, id=f"{board.name}-{panel.title}")
    for board in boards
    for panel in board.panels
    if panel.kind != "row"
]


def families() -> dict[str, Family]:
    """Every declared family by the names of its series."""
    found = {}
    for declared in generate_metrics.SERVICES.values():
        for family in declared:
            for end in ("_bucket", "_count", "_sum") if family.type == "histogram" else ("",):
                found[family.name + end] = family
    return found


def labels_of(metric: str) -> set[str]:
    if metric in FOREIGN:
        return FOREIGN[metric]
    if metric in {rule["record"] for rule in recorded()}:
        return set()
    declared = families()
    assert metric in declared, f"{metric}: nobody tells it"
    return set(declared[metric].labels) | ({"le"} if metric.endswith("_bucket") else set())


def test_the_files_are_what_the_program_makes() -> None:
    assert {path.name: path.read_text("utf-8") for path in FOLDER.iterdir()} == {
        path.name: text for path, text in files().items()
    }


def test_there_are_six_boards() -> None:
    assert tuple(board.name for board in BOARDS) == NAMES
    assert sorted(board.content["uid"] for board in boards) == sorted(f"penstock-{name}" for name in NAMES)


@pytest.mark.parametrize("panel", panels)
def test_a_panel_says_what_it_shows_and_what_to_do(panel: Panel) -> None:
    shows, _, act = panel.description.partition("\n\n**When it looks bad:** ")
    assert len(shows) > 20
    assert len(act) > 20
    assert panel.unit
    assert panel.targets


@pytest.mark.parametrize("board", boards, ids=lambda board: board.name)
def test_no_two_panels_overlap(board: Board) -> None:
    for panel in board.panels:
        assert panel.x + panel.width <= 24
    for one, other in combinations(board.panels, 2):
        assert not one.overlaps(other), (one.title, other.title)
    assert len({each["id"] for each in board.content["panels"]}) == len(board.panels)
    assert len({panel.title for panel in board.panels}) == len(board.panels)


@pytest.mark.parametrize("panel", panels)
def test_queries_use_series_and_labels_that_there_are(panel: Panel) -> None:
    for target in panel.targets:
        known = set(TARGET_LABELS)
        selectors = SELECTOR.findall(target.expr)
        assert selectors
        for metric, matchers in selectors:
            labels = labels_of(metric)
            matched = re.findall(r"(\w+)(?:=~|!=|=)", matchers)
            assert set(matched) <= labels | TARGET_LABELS, metric
            assert 'namespace=~"$namespace"' in matchers
            known |= labels
        for grouped in re.findall(r"\b(?:by|on) \(([^)]*)\)", target.expr):
            assert set(grouped.split(", ")) <= known
        assert set(re.findall(r"{{(\w+)}}", target.legend)) <= known
        # A name without braces would escape the chosen namespaces.
        bare = re.sub(r'"[^"]*"', "", SELECTOR.sub("", target.expr))
        assert not re.search(r"penstock_\w+|process_\w+_", bare)


@pytest.mark.parametrize("panel", panels)
def test_counters_are_shown_as_rates(panel: Panel) -> None:
    for target in panel.targets:
        for metric, matchers in SELECTOR.findall(target.expr):
            if metric.startswith("penstock_") and metric.endswith(("_total", "_bucket", "_count", "_sum")):
                begin = re.escape(f"{metric}{{{matchers}}}[")
                assert re.search(rf"(rate|increase)\({begin}", target.expr), metric


@pytest.mark.parametrize("board", boards, ids=lambda board: board.name)
def test_variables_are_declared_and_used(board: Board) -> None:
    variables = {each["name"] for each in board.content["templating"]["list"]}
    # What a variable says of itself is no use of it.
    text = str([board.content["panels"], board.content["templating"]["list"][1]])
    used = set(re.findall(r"\$\{?(\w+)", text)) - {"__all"}
    assert used - GRAFANAS_OWN == variables
    for panel in board.content["panels"]:
        for each in [panel, *panel.get("targets", [])] if panel["type"] != "row" else []:
            assert each["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_links_lead_to_boards_and_runbooks_that_there_are() -> None:
    found = set()
    for board in boards:
        assert board.content["links"][0]["tags"] == ["penstock"] == board.content["tags"]
        for panel in board.content["panels"]:
            for link in panel.get("links") or []:
                if board_link := re.match(r"/d/([\w-]+)\?", link["url"]):
                    assert board_link[1] in {each.content["uid"] for each in boards} - {board.content["uid"]}
                else:
                    name = link["url"].removeprefix("${runbooks}/")
                    assert (RUNBOOKS / name).is_file()
                    found.add(name)
    assert found == {page.name for page in RUNBOOKS.glob("*.md")}, "each runbook is linked where its figure is shown"


def test_every_query_can_be_parsed(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool on PATH: install Debian's package prometheus to try queries with it")
    queries = [fill_in(target.expr) for board in boards for panel in board.panels for target in panel.targets]
    rules = [{"record": f"board:query_{index}", "expr": query} for index, query in enumerate(queries)]
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "boards", "rules": rules}]}))
    done = subprocess.run(
        [promtool, "check", "rules", str(path)], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_page_has_a_section_and_a_picture_of_each_board() -> None:
    text = PAGE.read_text("utf-8")
    pictures = re.findall(r"^!\[.+\]\((dashboards/[\w-]+\.png)\)$", text, re.MULTILINE)
    assert pictures == [f"dashboards/{name}.png" for name in NAMES]
    assert [f"## {board.title}" for board in BOARDS] == [
        line for line in text.splitlines() if line in {f"## {board.title}" for board in BOARDS}
    ]
    for picture in pictures:
        content = (PAGE.parent / picture).read_bytes()
        assert content.startswith(b"\x89PNG")
        assert len(content) < MAX_PICTURE_BYTES
