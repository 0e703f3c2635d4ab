"""Processes of clients against a served pipeline, and what they saw; memory of the pipeline meanwhile."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from bench.rig.arrivals import Load, Visit
from bench.rig.chaos.pipeline import ROOT, RawServer, ServedPipeline

REDIS = "Redis data"  # what the server says that it holds, beside the memory of its process
MIB = 1 << 20


def start(load: Load) -> "subprocess.Popen[str]":
    """A process of clients."""
    command = [sys.executable, "-m", "bench.rig.arrivals", json.dumps(asdict(load))]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def finish(clients: "subprocess.Popen[str]") -> list[Visit]:
    """The figures that they saw, once they are done."""
    output, _ = clients.communicate()
    if clients.returncode:
        raise SystemExit(f"the clients failed with status {clients.returncode}")
    return [Visit(**json.loads(line)) for line in output.splitlines()]


def run(load: Load) -> list[Visit]:
    """One process of clients from beginning to end."""
    return finish(start(load))


@contextmanager
def raw_server(pipeline: ServedPipeline) -> Iterator[RawServer]:
    """A connection to the pipeline's Redis."""
    server = pipeline.server()
    try:
        yield server
    finally:
        server.close()


def memory_mib(pipeline: ServedPipeline) -> dict[str, float]:
    """Resident memory of each process of a pipeline, and of the data in its server, in MiB (Linux)."""
    found = {name: _resident_mib(pid) for name, pid in pipeline.pids().items()}
    with raw_server(pipeline) as server:
        info = server.command("INFO", "memory")
    assert isinstance(info, bytes)
    used = next(line for line in info.split() if line.startswith(b"used_memory:"))
    return found | {REDIS: int(used.partition(b":")[2]) / MIB}


def _resident_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text("utf-8").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


def wait_idle(pipeline: ServedPipeline, timeout_s: float = 60.0) -> None:
    """Until nothing waits and nothing is owned by a scheduler."""
    deadline_s = time.monotonic() + timeout_s
    with raw_server(pipeline) as server:
        while server.command("KEYS", "*:own:*") or server.command("EXISTS", "{penstock}:waiting"):
            if time.monotonic() > deadline_s:
                raise SystemExit("the pipeline does not come to rest")
            time.sleep(0.2)


def quantile(values: Sequence[float], share: float) -> float:
    """The value that this share of all does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def first_tokens_s(visits: Sequence[Visit]) -> list[float]:
    """Times to the first token of those that got one."""
    return [visit.first_s for visit in visits if visit.first_s]
