"""The rules for Prometheus: each alert fires when it should, stays quiet otherwise, and has a runbook."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_rules import CASES, PRESENT, RULES, RUNBOOKS, Case, alerts, groups, recorded

from tools import generate_metrics

SUFFIXES = ("_bucket", "_count", "_sum")
SECTIONS = ("## What it means", "## What to look at", "## What to do")
ids = [f"{index}-{case.alert}-{case.severity}" for index, case in enumerate(CASES)]


@pytest.fixture(scope="module")
def promtool() -> Path:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("no promtool on PATH: install Debian's package prometheus to test the rules with it")
    return Path(found)


def run(promtool: Path, *arguments: str) -> None:
    done = subprocess.run([promtool, *arguments], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def series(values: dict[str, str], *, beside: dict[str, str]) -> list[dict[str, str]]:
    names = {name.partition("{")[0] for name in values}
    others = {name: each for name, each in beside.items() if name not in names}
    return [{"series": name, "values": each} for name, each in (others | values).items()]


def fired(case: Case, *, minute: int) -> dict[str, Any]:
    """The query for an alert that fires, and what it finds."""
    labels = {"alertname": case.alert, "alertstate": "firing", "severity": case.severity} | case.labels
    written = "{" + ", ".join(f'{name}="{value}"' for name, value in labels.items()) + "}"
    query = f'ALERTS{{alertname="{case.alert}",severity="{case.severity}",alertstate="firing"}}'
    return {"expr": query, "eval_time": f"{minute}m", "exp_samples": [{"labels": f"ALERTS{written}", "value": 1}]}


def test_the_rules_can_be_read(promtool: Path) -> None:
    run(promtool, "check", "rules", str(RULES))


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_an_alert_fires_when_it_should_and_stays_quiet_otherwise(case: Case, promtool: Path, tmp_path: Path) -> None:
    fires = {"interval": "1m", "input_series": series(case.fires, beside=PRESENT)}
    quiet = {"interval": "1m", "input_series": series(case.quiet, beside=PRESENT)}
    never = {**fired(case, minute=case.at_minute), "exp_samples": []}
    tests = [
        {**fires, "promql_expr_test": [fired(case, minute=case.at_minute)]},
        {**quiet, "promql_expr_test": [{**never, "eval_time": f"{minute}m"} for minute in range(case.at_minute + 1)]},
    ]
    path = tmp_path / "test.yaml"
    path.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}))
    run(promtool, "test", "rules", str(path))


def test_each_alert_is_tried() -> None:
    assert {(case.alert, case.severity) for case in CASES} == {
        (rule["alert"], rule["labels"]["severity"]) for rule in alerts()
    }


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: f"{rule['alert']}-{rule['labels']['severity']}")
def test_each_alert_says_what_it_is_and_where_to_read_on(rule: dict[str, Any]) -> None:
    assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
    page = RUNBOOKS / Path(rule["annotations"]["runbook_url"]).name
    assert rule["annotations"]["runbook_url"] == f"docs/runbooks/{page.name}"
    text = page.read_text()
    assert rule["alert"] in text.partition("\n## ")[0], "its head names the alerts that it is about"
    places = [text.index(section) for section in SECTIONS]
    assert places == sorted(places)


def test_each_runbook_belongs_to_an_alert() -> None:
    told = {Path(rule["annotations"]["runbook_url"]).name for rule in alerts()}
    assert {page.name for page in RUNBOOKS.glob("*.md")} == told


def test_rules_use_metrics_that_there_are() -> None:
    declared = {family.name for families in generate_metrics.SERVICES.values() for family in families}
    records = {rule["record"] for rule in recorded()}
    for group in groups():
        for rule in group["rules"]:
            for name in set(re.findall(r"[a-z:]*penstock_\w+(?::\w+)*", rule["expr"])):
                base = next((name.removesuffix(end) for end in SUFFIXES if name.removesuffix(end) in declared), name)
                assert base in declared | records, name


def test_runbooks_use_metrics_that_there_are() -> None:
    declared = {family.name for families in generate_metrics.SERVICES.values() for family in families}
    records = {rule["record"] for rule in recorded()}
    for page in RUNBOOKS.glob("*.md"):
        for name in set(re.findall(r"[a-z:]*penstock_\w+(?::\w+)*", page.read_text())):
            base = next((name.removesuffix(end) for end in SUFFIXES if name.removesuffix(end) in declared), name)
            assert base in declared | records, (page.name, name)
