"""The metrics of all processes on one port; ports that stay the same."""

import os
import signal
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families
from served import SIMULATED, Served, wait_until

from penstock.launcher.ports import free_ports
from servicekit.tokens import write_token

TOKEN = "of-metrics-" * 3
NAMES = {f"{kind}-0" for kind in ("gateway", "tokenizer", "scheduler", "worker", "detokenizer")}


@pytest.fixture(scope="module")
def port() -> int:
    (found,) = free_ports(1)
    return found


@pytest.fixture(scope="module")
def served(checkpoint: Path, port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("metrics")
    write_token(folder / "token", TOKEN)
    flags = (f"--model={checkpoint}", f"--metrics-port={port}", f"--metrics-token-file={folder}/token", *SIMULATED)
    with Served(folder, *flags) as served:
        yield served.wait_ready()


def scrape(port: int, token: str, accept: str = "text/plain") -> str:
    headers = {"Accept": accept} | ({"Authorization": f"Bearer {token}"} if token else {})
    asked = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers=headers)
    with urllib.request.urlopen(asked, timeout=300) as reply:
        text: str = reply.read().decode()
    return text


def test_one_port_tells_what_all_processes_do(served: Served, port: int) -> None:
    with served.client() as client:
        client.complete("abc")

    def have_counted() -> bool:
        found = list(text_string_to_metric_families(scrape(port, TOKEN)))
        assert len({family.name for family in found}) == len(found), "a family comes once"
        samples = [sample for family in found for sample in family.samples]
        told = {(sample.name, sample.labels.get("process")): sample.value for sample in samples}
        up = {process: value for (name, process), value in told.items() if name == "penstock_up"}
        assert set(up) == NAMES
        counted = ("penstock_delivered_tokens_total", "gateway-0"), ("penstock_generated_tokens_total", "scheduler-0")
        return set(up.values()) == {1.0} and all(told.get(each, 0) >= 16 for each in counted)

    wait_until(have_counted, "all have counted the tokens")


def test_the_page_in_openmetrics_names_requests_as_examples(served: Served, port: int) -> None:
    with served.client() as client:
        client.complete("abc")

    def names_one() -> bool:
        page = scrape(port, TOKEN, "application/openmetrics-text; version=1.0.0")
        assert page.endswith("# EOF\n")
        found = {family.name: family for family in read_openmetrics(page)}
        # Of processes that did not answer in time nothing is there.
        waits = found.get("penstock_hop_wait_seconds")
        if waits is None:
            return False
        assert waits.unit == "seconds"
        told = found.get("penstock_time_to_first_token_seconds")
        exemplars = [each.exemplar for each in told.samples if each.exemplar is not None] if told else []
        return any(set(each.labels) == {"request_id"} for each in exemplars)

    wait_until(names_one, "an exemplar of the first token")
    assert "request_id" not in scrape(port, TOKEN), "plain text has no exemplars"


@pytest.mark.usefixtures("served")
def test_the_port_asks_for_the_token(port: int) -> None:
    for token in ("", TOKEN[:-1]):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            scrape(port, token)


def test_a_process_that_is_away_is_told_as_such(served: Served, port: int) -> None:
    def is_missed() -> bool:
        # Killed at each look: it is soon started again.
        with suppress(ProcessLookupError):
            os.kill(served.pids()["detokenizer-0"], signal.SIGKILL)
        return 'penstock_up{process="detokenizer-0"} 0.0' in scrape(port, TOKEN)

    wait_until(is_missed, "it is missed")
    wait_until(lambda: 'penstock_up{process="detokenizer-0"} 1.0' in scrape(port, TOKEN), "it is back")


def test_a_port_that_is_taken_is_told_by_its_flag(checkpoint: Path, tmp_path: Path) -> None:
    # Where nobody else takes ports: what is given to connections may be one of the pipeline's own at any moment.
    first, *_, sixth = free_ports(6)
    with socket.create_server(("127.0.0.1", sixth)):
        flags = (f"--model={checkpoint}", f"--first-port={first}", *SIMULATED)
        with Served(tmp_path, *flags) as served:
            assert served.process.wait(300) == 2
        assert "choose another --first-port" in served.err
