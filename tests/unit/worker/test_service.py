"""The worker as a service on the bus in memory, with a scheduler that the test plays."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice

import pytest
from memory_bus import MemoryBus
from played_scheduler import PROMPT, TIMEOUT_S, Scheduler, column, tokens, until
from wrapped_runners import Failing, Held

from contract import __version__
from contract.domain.errors import ErrorCode, PenstockError
from contract.domain.params import Sampling
from contract.domain.plan import StepPlan
from contract.v1 import results_pb2, steps_pb2
from servicekit.bus import keys as k
from servicekit.bus.calls import (
    Append,
    Leave,
    ListSessions,
    ListWorkers,
    Read,
    SessionKind,
    WorkerEntry,
)
from servicekit.lifecycle import Stop
from worker_svc.core.interface import DeviceError, PendingStep
from worker_svc.core.pretended_model import expected_tokens
from worker_svc.loading import LoadedWorker, load_worker
from worker_svc.service import WorkerService
from worker_svc.settings import WorkerSettings


@dataclass
class Running:
    """A service in a thread."""

    service: WorkerService
    bus: MemoryBus
    stop: Stop = field(default_factory=Stop)
    error: Exception | None = None

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.service.run(self.stop)
        except Exception as error:  # noqa: BLE001
            self.error = error

    def registered(self) -> WorkerEntry:
        """Waits until the worker is alive in the pool."""
        living: list[WorkerEntry] = []

        def is_there() -> bool:
            living.extend(each for each in self.bus.connect().call(ListWorkers()) if each.alive)
            return bool(living)

        until(is_there)
        return living[0]

    def end(self) -> None:
        self.stop.drain()
        self.thread.join(TIMEOUT_S)
        assert not self.thread.is_alive()


@pytest.fixture
def bus() -> MemoryBus:
    return MemoryBus()


def settings(**changes: object) -> WorkerSettings:
    fields = {"model": "pretended", "name": "w", "runner": "simulated", "step_ms": 0.0, "max_num_seqs": 4}
    return WorkerSettings(**(fields | changes))  # type: ignore[arg-type]


@pytest.fixture
def running(bus: MemoryBus) -> Iterator[Running]:
    worker = Running(WorkerService(settings(), bus), bus)
    yield worker
    worker.end()
    assert worker.error is None


def expected(count: int) -> list[int]:
    loaded = load_worker(settings())
    return list(islice(expected_tokens(PROMPT, Sampling(temperature=0.0), 0, loaded.runner.limits), count))


def test_it_registers_what_it_is_and_carries_out_plans(running: Running, bus: MemoryBus) -> None:
    info = results_pb2.WorkerInfo.FromString(running.registered().info)
    assert (info.model, info.max_num_seqs, info.device, info.world_size) == ("pretended", 4, "simulated", 1)
    scheduler = Scheduler(bus)
    incarnation = scheduler.pair().incarnation
    scheduler.send(1, len(PROMPT), admit=True)
    for step in (2, 3, 4):
        scheduler.send(step)
    results = scheduler.results(4)
    assert tokens(results) == expected(4)
    assert [result.step for result in results] == [1, 2, 3, 4]
    assert {result.origin.session for result in results} == {incarnation}
    assert {result.scheduler_session for result in results} == {scheduler.sid}
    status = running.service.worker_status()
    assert (status.step, status.plans_queued, status.incarnation) == (4, 0, incarnation)
    assert status.service.ready
    assert running.service.memory_profile().num_blocks == info.num_blocks


def test_plans_that_come_twice_or_for_another_incarnation_are_dropped(running: Running, bus: MemoryBus) -> None:
    running.registered()
    scheduler = Scheduler(bus)
    scheduler.pair()
    scheduler.send(1, len(PROMPT), admit=True)
    scheduler.send(2)
    scheduler.send(2)
    stranger = steps_pb2.StepPlan(incarnation=b"x" * 16, step=3)
    stranger.origin.session = scheduler.sid
    scheduler.send_raw(stranger.SerializeToString())
    scheduler.send(3)
    results = scheduler.results(3)
    assert [result.step for result in results] == [1, 2, 3]
    assert tokens(results) == expected(3)


@pytest.mark.parametrize("trouble", ["gap", "poison", "refused"])
def test_an_epoch_that_breaks_is_told_and_another_incarnation_goes_on(
    trouble: str, running: Running, bus: MemoryBus
) -> None:
    running.registered()
    scheduler = Scheduler(bus)
    first = scheduler.pair().incarnation
    scheduler.send(1, len(PROMPT), admit=True)
    if trouble == "gap":
        scheduler.send(3)
    elif trouble == "poison":
        scheduler.send_raw(b"\xff\xff")
    else:
        scheduler.send(2, slots=column(3))
    scheduler.send(4)
    before, failed = scheduler.results(2)
    assert tokens([before]) == expected(1)
    # Plans that are missing are no request's fault.
    assert failed.error.code == (ErrorCode.UNAVAILABLE if trouble == "gap" else ErrorCode.INTERNAL)
    assert failed.step == (3 if trouble == "gap" else 2)
    scheduler.pair_with_another_than(first)
    scheduler.send(1, len(PROMPT), admit=True)
    scheduler.send(2)
    assert tokens(scheduler.results(2)) == expected(2)
    dead = bus.connect().call(Read({bus.keys.dead: b"0-0"})).get(bus.keys.dead, [])
    assert [entry.fields[k.STREAM] for entry in dead] == ([b"steps"] if trouble == "poison" else [])


def test_poison_before_any_epoch_makes_a_new_incarnation_too(running: Running, bus: MemoryBus) -> None:
    running.registered()
    scheduler = Scheduler(bus)
    first = scheduler.pair().incarnation
    bus.connect().call(Append(bus.keys.steps("w"), {b"nothing": b""}))
    scheduler.pair_with_another_than(first)
    scheduler.send(1, len(PROMPT), admit=True)
    assert tokens(scheduler.results(1)) == expected(1)


def test_another_scheduler_begins_with_empty_slots_and_old_results_are_not_published(bus: MemoryBus) -> None:
    held: list[Held] = []

    def load(each: WorkerSettings) -> LoadedWorker:
        loaded = load_worker(each)
        held.append(Held(loaded.runner))
        return replace(loaded, runner=held[0])

    running = Running(WorkerService(settings(), bus, load=load), bus)
    running.registered()
    first = Scheduler(bus)
    first.pair()
    first.send(1, len(PROMPT), admit=True)
    first.send(2)
    first.connection.call(Leave(first.sid))
    second = Scheduler(bus)
    second.pair()
    second.send(1, len(PROMPT), admit=True)
    until(lambda: held[0].num_launched == 3)  # so the worker knows of the second before any step of the first ends
    held[0].released.set()
    assert [result.scheduler_session for result in second.results(1)] == [second.sid]
    running.end()


def num_registrations(bus: MemoryBus) -> int:
    return int(sum(bus.call_times.by_call()["register_worker"].counts))


def test_a_bus_that_comes_back_finds_the_worker_again(running: Running, bus: MemoryBus) -> None:
    running.registered()
    scheduler = Scheduler(bus)
    scheduler.pair()
    scheduler.send(1, len(PROMPT), admit=True)
    scheduler.results(1)
    scheduler.connection.call(Leave(scheduler.sid))
    before = num_registrations(bus)
    bus.stop()
    bus.start()
    scheduler = Scheduler(bus)
    until(lambda: num_registrations(bus) > before)  # a pairing ends by it
    scheduler.pair()
    scheduler.send(1, len(PROMPT), admit=True)
    assert tokens(scheduler.results(1)) == expected(1)


def failing(device: str, **errors: Exception) -> Callable[[WorkerSettings], LoadedWorker]:
    """On a `cpu` a thread of its own launches, elsewhere the reader does."""

    def load(each: WorkerSettings) -> LoadedWorker:
        loaded = load_worker(each)
        runner = Failing(loaded.runner, **errors)  # type: ignore[arg-type]
        return replace(loaded, runner=runner, device=device)

    return load


@pytest.mark.parametrize("device", ["cpu", "simulated"])
def test_a_launch_that_fails_ends_the_epoch_only(device: str, bus: MemoryBus) -> None:
    running = Running(WorkerService(settings(), bus, failing(device, launch_error=MemoryError("too little"))), bus)
    running.registered()
    scheduler = Scheduler(bus)
    first = scheduler.pair().incarnation
    scheduler.send(1, len(PROMPT), admit=True)
    for step in (2, 3, 4):
        scheduler.send(step)
    results = scheduler.results(3)
    assert tokens(results[:2]) == expected(2)
    assert "MemoryError: too little" in results[2].error.message
    scheduler.pair_with_another_than(first)
    scheduler.send(1, len(PROMPT), admit=True)
    assert tokens(scheduler.results(1)) == expected(1)
    running.end()
    assert running.error is None


@pytest.mark.parametrize("device", ["cpu", "simulated"])
@pytest.mark.parametrize("where", ["launch_error", "result_error"])
def test_a_device_that_fails_ends_the_service(where: str, device: str, bus: MemoryBus) -> None:
    error = DeviceError(3, RuntimeError("gone"))
    running = Running(WorkerService(settings(), bus, failing(device, **{where: error})), bus)
    running.registered()
    scheduler = Scheduler(bus)
    scheduler.pair()
    scheduler.send(1, len(PROMPT), admit=True)
    for step in (2, 3):
        scheduler.send(step)
    running.thread.join(TIMEOUT_S)
    assert running.error is error
    assert not any(worker.alive for worker in bus.connect().call(ListWorkers()))


def test_draining_publishes_what_was_read_and_leaves(bus: MemoryBus) -> None:
    running = Running(WorkerService(settings(step_ms=30.0), bus), bus)
    running.registered()
    scheduler = Scheduler(bus)
    scheduler.pair()
    scheduler.send(1, len(PROMPT), admit=True)
    for step in range(2, 6):
        scheduler.send(step)
    until(lambda: running.service.worker_status().step == 5)
    running.service.drain()
    assert not running.service.is_ready()
    running.thread.join(TIMEOUT_S)
    assert tokens(scheduler.results(5)) == expected(5)
    assert not any(worker.alive for worker in bus.connect().call(ListWorkers()))


def test_a_device_that_hangs_ends_the_worker_without_leaving_in_order(bus: MemoryBus) -> None:
    running = Running(WorkerService(settings(hang_on_token=PROMPT[0], step_timeout_s=1.0), bus), bus)
    running.registered()
    scheduler = Scheduler(bus)
    scheduler.pair()
    scheduler.send(1, len(PROMPT), admit=True)
    running.thread.join(TIMEOUT_S)
    assert not running.thread.is_alive()
    assert isinstance(running.error, PenstockError)
    assert "the device has not ended a step for 1 s" in running.error.message
    (session,) = [each for each in bus.connect().call(ListSessions()) if each.kind is SessionKind.WORKER]
    assert (session.alive, session.left) == (False, False)


@pytest.mark.parametrize("drains", [False, True])
def test_a_launch_that_takes_long_is_progress_and_the_worker_keeps_its_session(bus: MemoryBus, drains: bool) -> None:
    launching, go_on = threading.Event(), threading.Event()

    def load(settings: WorkerSettings) -> LoadedWorker:
        loaded = load_worker(settings)

        class Compiling(Failing):
            def launch(self, plan: StepPlan) -> PendingStep:
                launching.set()
                go_on.wait(TIMEOUT_S)
                return super().launch(plan)

        return replace(loaded, runner=Compiling(loaded.runner))

    service = WorkerService(settings(session_ttl_s=0.5), bus, load)
    running = Running(service, bus)
    running.registered()
    scheduler = Scheduler(bus)
    scheduler.pair()
    scheduler.send(1, len(PROMPT), admit=True)
    assert launching.wait(TIMEOUT_S)
    if drains:
        service.drain()
    before_ns = time.monotonic_ns()
    until(lambda: service.last_progress_ns() > before_ns + 10**9)  # two leases long
    # A machine that stands still for longer than a lease lets one run out, and the worker renews it.
    until(lambda: all(worker.alive for worker in bus.connect().call(ListWorkers())))
    go_on.set()
    assert tokens(scheduler.results(1)) == expected(1)
    running.end()


def test_what_cannot_be_loaded_is_raised_before_it_was_ready(bus: MemoryBus) -> None:
    service = WorkerService(settings(runner="model", model="/nowhere"), bus)
    with pytest.raises(PenstockError, match="the model directory /nowhere does not exist"):
        service.run(Stop())
    with pytest.raises(PenstockError, match="still being loaded"):
        service.memory_profile()


def test_metrics_tell_what_was_computed(running: Running, bus: MemoryBus) -> None:
    running.registered()
    scheduler = Scheduler(bus)
    scheduler.pair()
    scheduler.send(1, len(PROMPT), admit=True)
    scheduler.results(1)

    def samples() -> dict[str, float]:
        return {
            sample.name: sample.value
            for collector in running.service.collectors()
            for metric in collector.collect()
            for sample in metric.samples
        }

    # What took the plan says so once that is carried out, perhaps after the result was read.
    until(lambda: samples()["penstock_hop_wait_seconds_count"] == 1)
    told = samples()
    assert told["penstock_step_seconds_count"] == 1
    assert told["penstock_sampled_tokens_total"] == 1
    assert {"penstock_device_idle_seconds_total", "penstock_plans_queued", "penstock_worker_info"} <= told.keys()


def test_the_page_of_metrics_tells_what_computes(running: Running) -> None:
    running.registered()
    labels = {
        sample.name: sample.labels
        for collector in running.service.collectors()
        for metric in collector.collect()
        for sample in metric.samples
        if sample.name.endswith("_info")
    }
    digest = running.service.status().model_digest
    assert labels == {
        "penstock_worker_info": {"attention": "simulated"},
        "penstock_model_info": {"model": "pretended", "digest": digest, "version": __version__},
    }


def test_a_simulated_worker_does_not_import_torch() -> None:
    code = (
        "import sys, worker_svc.__main__\n"
        "from worker_svc.loading import load_worker\n"
        "from worker_svc.settings import WorkerSettings\n"
        "load_worker(WorkerSettings(model='m', runner='simulated')).close()\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
