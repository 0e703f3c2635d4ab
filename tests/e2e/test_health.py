"""Every service says over HTTP, beside its metrics, whether it makes progress and takes work."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from served import SIMULATED, Served, wait_until


@pytest.fixture
def served(checkpoint: Path, tmp_path: Path) -> Iterator[Served]:
    with Served(tmp_path, f"--model={checkpoint}", "--log-format=json", *SIMULATED) as served:
        yield served.wait_ready()


def metrics_ports(served: Served) -> dict[str, int]:
    """Of each service, as its first line says."""
    lines = [json.loads(line) for line in served.err.splitlines() if '"metrics_port"' in line]
    return {fields["service"]: fields["metrics_port"] for fields in lines}


def check(port: int, path: str) -> int:
    try:
        return httpx.get(f"http://127.0.0.1:{port}{path}", timeout=5).status_code
    except httpx.TransportError:
        return 0


def test_every_service_is_alive_and_ready_and_no_longer_ready_once_it_drains(served: Served) -> None:
    ports = metrics_ports(served)
    assert ports.keys() == {"gateway", "tokenizer", "scheduler", "worker", "detokenizer"}
    for port in ports.values():
        wait_until(lambda port=port: (check(port, "/health"), check(port, "/ready")) == (200, 200), 20, "ready")
    os.kill(served.pids()["scheduler-0"], signal.SIGTERM)
    wait_until(lambda: check(ports["scheduler"], "/ready") != 200, 20, "not ready")
