"""Workers as processes of their own on a real server: two ranks, the control service, signals and exit statuses."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from itertools import islice
from pathlib import Path

import grpc
import numpy as np
import pytest
from played_scheduler import PROMPT, Scheduler, tokens, until
from tiny_models import make_runner, save_model

from contract.domain.params import Sampling
from contract.domain.plan import Admission, StepPlan
from contract.v1 import worker_pb2, worker_pb2_grpc
from penstock.launcher.ports import free_ports
from servicekit.bus import Bus, open_bus
from servicekit.bus.embedded import EmbeddedServer
from worker_svc.core.pretended_model import expected_tokens
from worker_svc.loading import load_worker
from worker_svc.settings import WorkerSettings

START_S = 1200.0


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The schedulers that tests play wait for a server that a busy machine gives no time."""
    monkeypatch.setattr("servicekit.bus.redis_connection.PATIENCE_S", 60.0)


@pytest.fixture
def schedulers() -> Iterator[ExitStack]:
    """Closes the schedulers that a test plays."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = EmbeddedServer(tmp_path_factory.mktemp("server"))
    server.start()
    yield server.url
    server.close()


def start(url: str, pool: str, *arguments: str) -> subprocess.Popen[str]:
    common = ("--redis-url", url, "--pool", pool, "--name", "w", "--log-format", "json")
    return subprocess.Popen(
        [sys.executable, "-m", "worker_svc", *common, *arguments], stderr=subprocess.PIPE, text=True
    )


def play(schedulers: ExitStack, bus: Bus) -> Scheduler:
    return schedulers.enter_context(closing(Scheduler(bus)))


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, log = process.communicate(timeout=300)
    return process.returncode, log


def run_prompt(scheduler: Scheduler, count: int) -> list[int]:
    scheduler.send(1, len(PROMPT), admit=True)
    for step in range(2, count + 1):
        scheduler.send(step)
    return tokens(scheduler.results(count))


def reference(count: int) -> list[int]:
    runner = make_runner()
    ids, slot, one = np.array(PROMPT, np.uint32), np.zeros(1, np.uint32), np.ones(1, np.uint32)
    admission = Admission(0, ids, len(PROMPT), 0, np.arange(8, dtype=np.uint32), Sampling(temperature=0.0), 0)
    plans = [StepPlan(1, admissions=(admission,), slots=slot, num_tokens=one * len(PROMPT))]
    plans += [StepPlan(step, slots=slot, num_tokens=one) for step in range(2, count + 1)]
    return [int(runner.launch(plan).result().token_ids[0]) for plan in plans]


def test_two_ranks_read_the_same_plans_and_outlive_a_broken_epoch(
    url: str, tmp_path: Path, schedulers: ExitStack
) -> None:
    save_model(tmp_path)
    ranks = [
        start(
            url, "ranks", "--model", str(tmp_path), "--device", "cpu", "--max-num-seqs", "4", "--block-size", "4",
            "--tensor-parallel-size", "2", "--rank", str(rank), "--distributed-address", f"file://{tmp_path}/rendezvous",
            "--num-threads", "1",
        )
        for rank in range(2)
    ]  # fmt: skip
    scheduler = play(schedulers, open_bus(url, "ranks"))
    first = scheduler.pair(START_S).incarnation
    assert run_prompt(scheduler, 6) == reference(6)
    scheduler.send(9)
    (failed,) = scheduler.results(1)
    assert "plans before step 9 are missing" in failed.error.message
    scheduler.pair_with_another_than(first)
    assert run_prompt(scheduler, 6) == reference(6)
    for rank in ranks:
        rank.send_signal(signal.SIGTERM)
    for rank in ranks:
        status, log = ended(rank)
        assert status == 0, log


def simulated_reference(count: int) -> list[int]:
    limits = load_worker(WorkerSettings(model="m", runner="simulated")).runner.limits
    return list(islice(expected_tokens(PROMPT, Sampling(temperature=0.0), 0, limits), count))


def test_the_control_service_tells_and_drains(url: str, schedulers: ExitStack) -> None:
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    process = start(url, "control", "--model", "m", "--runner", "simulated", "--grpc-address", address)
    scheduler = play(schedulers, open_bus(url, "control"))
    incarnation = scheduler.pair(START_S).incarnation
    assert run_prompt(scheduler, 3) == simulated_reference(3)
    with grpc.insecure_channel(address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        status = stub.GetStatus(worker_pb2.GetWorkerStatusCall(), wait_for_ready=True, timeout=300)
        assert (status.incarnation, status.step, status.info.model) == (incarnation, 3, "m")
        profile = stub.ProfileMemory(worker_pb2.ProfileMemoryCall(), timeout=300)
        assert profile.num_blocks == status.info.num_blocks
        assert stub.Drain(worker_pb2.DrainWorkerCall(), timeout=300).plans_left == 0
    status_code, log = ended(process)
    assert status_code == 0, log
    assert "registered" in [json.loads(line)["event"] for line in log.splitlines()]


def test_a_worker_that_starts_before_its_server_waits_for_it(tmp_path: Path, schedulers: ExitStack) -> None:
    (port,) = free_ports(1)
    server = EmbeddedServer(tmp_path, port=port)
    process = start(server.url, "late", "--model", "m", "--runner", "simulated")
    assert process.stderr is not None
    until(lambda: "waiting for the bus" in process.stderr.readline(), START_S)
    server.start()
    scheduler = play(schedulers, open_bus(server.url, "late"))
    scheduler.pair(START_S)
    assert run_prompt(scheduler, 2) == simulated_reference(2)
    process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == 0
    server.close()


def test_a_checkpoint_that_is_not_there_is_one_sentence_and_status_two(url: str) -> None:
    status, log = ended(start(url, "none", "--model", "/nowhere/at/all"))
    assert status == 2
    assert "the model directory /nowhere/at/all does not exist" in log
    assert "Traceback" not in log
