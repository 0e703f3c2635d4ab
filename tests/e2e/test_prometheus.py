"""A real Prometheus scrapes a pipeline under load: what rules record, alerts compare and boards show is there."""

import contextlib
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from served import CALM_LEASES, ROOT, SIMULATED, Served, wait_until

from bench.rig.boards import fill_in, read_boards
from bench.rig.prometheus import Prometheus, is_installed
from contract.domain.params import SamplingParams
from penstock.client import Client
from penstock.launcher.ports import free_ports

RULES = ROOT / "deploy" / "helm" / "penstock" / "files" / "prometheus-rules.yaml"
DEATHS_LIMIT_S = 600.0  # a rate shows what was lost for the second time only, and not every death finds something
NUM_CLIENTS = 2
SCRAPE_S = 5  # a scrape asks five processes, each of which has a machine's load to bear


@pytest.fixture(scope="module")
def served(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, int]]:
    if not is_installed():
        pytest.skip("no prometheus on PATH: install Debian's package prometheus to try queries with it")
    (port,) = free_ports(1)
    flags = (
        *(f"--model={checkpoint}", f"--metrics-port={port}", "--metrics-aliases=vllm", "--trust-tenant-header"),
        *("--workers=2", CALM_LEASES, "--outage-patience-s=60", *SIMULATED),
    )
    with Served(tmp_path_factory.mktemp("served"), *flags) as served:
        yield served.wait_ready(), port


@pytest.fixture(scope="module")
def prometheus(served: tuple[Served, int], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Scrapes and evaluates, while clients ask for text."""
    pipeline, metrics_port = served
    has_ended = threading.Event()

    def ask_for_text(number: int) -> None:
        with Client(pipeline.grpc_address, tenant=f"tenant-{number}") as client:
            while not has_ended.is_set():
                client.complete(f"prompt {number}", SamplingParams(max_tokens=50))

    with ThreadPoolExecutor(NUM_CLIENTS) as threads:
        clients = [threads.submit(ask_for_text, number) for number in range(NUM_CLIENTS)]
        folder = tmp_path_factory.mktemp("prometheus")
        try:
            with Prometheus(folder, metrics_port, scrape_s=SCRAPE_S, rules=RULES) as running:
                yield running
                sys.stderr.write(running.log_path.read_text())
        finally:
            has_ended.set()
        for client in clients:
            client.result()


def rules(kind: str) -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"] if kind in rule]


@pytest.mark.parametrize("rule", rules("record"), ids=lambda rule: rule["record"])
def test_a_recording_rule_has_data(rule: dict[str, Any], prometheus: Prometheus) -> None:
    wait_until(lambda: bool(prometheus.values(rule["record"])), rule["record"])


@pytest.mark.parametrize("rule", rules("alert"), ids=lambda rule: f"{rule['alert']}-{rule['labels']['severity']}")
def test_what_an_alert_compares_has_data(rule: dict[str, Any], prometheus: Prometheus) -> None:
    queries = re.findall(r"absent\((.*?)\)", rule["expr"])
    if not queries:
        queries = [re.sub(r"\s*(==|!=|>=|<=|>|<)\s*[\d.]+", "", rule["expr"])]
        assert queries[0] != rule["expr"]
    for query in queries:
        wait_until(lambda query=query: bool(prometheus.values(query)), query)


def test_no_alert_fires_while_nothing_is_wrong(prometheus: Prometheus) -> None:
    names = {rule["alert"] for rule in rules("alert")}
    evaluated = {rule["name"] for group in prometheus.ask("rules", type="alert")["groups"] for rule in group["rules"]}
    assert evaluated == names
    assert prometheus.values('ALERTS{alertstate="firing"}') == []


def test_exemplars_name_requests(prometheus: Prometheus) -> None:
    query = {"query": "penstock_time_to_first_token_seconds_bucket", "start": "0", "end": "9999999999"}

    def labels() -> set[str]:
        found = prometheus.ask("query_exemplars", **query)
        return {name for series in found for each in series["exemplars"] for name in each["labels"]}

    wait_until(lambda: labels() == {"request_id"}, "exemplars")


def test_names_of_vllm_are_there(prometheus: Prometheus) -> None:
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info"):
        wait_until(lambda name=name: bool(prometheus.values(f"vllm:{name}")), name)
    wait_until(lambda: max(prometheus.values("vllm:num_requests_running"), default=0) > 0, "what runs")


class Deaths:
    """A worker dies, and a detokenizer: what boards tell of recovery needs something that was lost, not long ago."""

    def __init__(self, pipeline: Served) -> None:
        self._pipeline = pipeline
        self._last_s = float("-inf")

    def repeat(self) -> None:
        """Once in a minute, for as long as somebody misses what they bring: a death may find nothing that runs."""
        # No alert minds one death of each, so the test that none fires may run before or after.
        if time.monotonic() > self._last_s + 60:
            self._last_s = time.monotonic()
            for name in ("worker-0", "detokenizer-0"):
                with contextlib.suppress(ProcessLookupError):  # it is just being started again
                    os.kill(self._pipeline.pids()[name], signal.SIGKILL)


@pytest.fixture(scope="module")
def deaths(served: tuple[Served, int], prometheus: Prometheus) -> Deaths:
    return Deaths(served[0])


@pytest.mark.parametrize(
    "query",
    [
        pytest.param(target.expr, id=f"{board.name}-{panel.title}-{target.legend}")
        for board in read_boards()
        for panel in board.panels
        for target in panel.targets
    ],
)
def test_a_board_has_data(query: str, prometheus: Prometheus, deaths: Deaths) -> None:
    asked = fill_in(query)

    def has_data() -> bool:
        found = bool(prometheus.values(asked))
        if not found:
            deaths.repeat()
        return found

    wait_until(has_data, asked, DEATHS_LIMIT_S)
