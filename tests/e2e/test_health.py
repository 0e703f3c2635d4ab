"""Every service says over HTTP, beside its metrics, whether it makes progress and takes work."""

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import httpx
import pytest
from served import ENDLESS_TOKENS, LONG_LEASES, SIMULATED, Served, expected, wait_until

from contract.domain.params import SamplingParams
from penstock.client import Accepted, Delta, resumption

KINDS = {"gateway", "tokenizer", "scheduler", "worker", "detokenizer"}
PROMPT, NUM_TOKENS = [1, 2, 3], 400


@pytest.fixture
def served(long_checkpoint: Path, tmp_path: Path) -> Iterator[Served]:
    flags = (f"--model={long_checkpoint}", "--log-format=json", "--step-ms=1", "--drain-timeout-s=300", *SIMULATED)
    with Served(tmp_path, *flags) as served:
        yield served.wait_ready()


def metrics_ports(served: Served) -> dict[str, int]:
    """Of each service, as its first line says."""
    lines = [json.loads(line) for line in served.err.splitlines() if '"metrics_port"' in line]
    return {fields["service"]: fields["metrics_port"] for fields in lines}


def check(port: int, path: str) -> int:
    try:
        return httpx.get(f"http://127.0.0.1:{port}{path}", timeout=60).status_code
    except httpx.TransportError:
        return 0


def test_every_service_is_alive_and_ready_and_no_longer_ready_once_it_drains(served: Served) -> None:
    ports = metrics_ports(served)
    assert ports.keys() == KINDS
    for port in ports.values():
        wait_until(lambda port=port: (check(port, "/health"), check(port, "/ready")) == (200, 200), "ready")
    with served.client() as client:
        stream = client.generate([1, 2, 3], SamplingParams(max_tokens=ENDLESS_TOKENS, ignore_eos=True))
        assert not isinstance([next(stream), next(stream)][1], Accepted)
        os.kill(served.pids()["scheduler-0"], signal.SIGTERM)  # it drains for as long as the stream goes on
        wait_until(lambda: check(ports["scheduler"], "/ready") == 503, "not ready")
        assert check(ports["scheduler"], "/health") == 200
        stream.close()


@pytest.fixture
def sticky(checkpoint: Path, tmp_path: Path) -> Iterator[Served]:
    """A pipeline whose loops hang at a signal."""
    patience = ("--orphan-grace-s=600", "--max-restart-pause-s=0.2")
    flags = (f"--model={checkpoint}", "--log-format=json", "--step-ms=10", *patience, LONG_LEASES, *SIMULATED)
    path = os.pathsep.join(filter(None, (str(Path(__file__).parent / "stuck"), os.environ.get("PYTHONPATH"))))
    with Served(tmp_path, *flags, environ={"PYTHONPATH": path}) as served:
        yield served.wait_ready()


def test_a_loop_that_is_stuck_is_found_in_each_service_though_its_health_port_answers(
    sticky: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All at once, so that nobody else can be the reason; a client's stream goes on after what it has."""
    monkeypatch.setattr(resumption, "PATIENCE_S", 600.0)  # nothing comes until all are found and started again
    began = Event()

    def generate() -> list[int]:
        token_ids: list[int] = []
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        with sticky.client() as client:
            for event in client.generate(PROMPT, params, resumable=True):
                if isinstance(event, Delta):
                    assert event.token_offset == len(token_ids)
                    token_ids.extend(event.token_ids)
                    began.set()
        return token_ids

    pids = sticky.pids()
    with ThreadPoolExecutor(1) as pool:
        generation = pool.submit(generate)
        assert began.wait(300)
        for kind in KINDS:
            os.kill(pids[f"{kind}-0"], signal.SIGUSR1)
        for kind in KINDS:
            wait_until(lambda kind=kind: f"{kind}-0 hangs, it makes no progress: killing it" in sticky.err, kind)
        wait_until(lambda: all(sticky.pids()[f"{kind}-0"] != pids[f"{kind}-0"] for kind in KINDS), "replaced")
        assert generation.result() == expected(PROMPT, NUM_TOKENS)
    assert "it does not answer" not in sticky.err
