"""`serve` in this process's main thread: services that end, fail, hang and are told to stop."""

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import grpc
import httpx
import pytest
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from contract.domain.errors import ErrorCode, PenstockError
from contract.v1 import status_pb2
from penstock.launcher.ports import free_ports
from servicekit import lifecycle
from servicekit.bus.calls import SessionKind
from servicekit.lifecycle import EXIT_CANNOT_START, EXIT_FAILED, EXIT_OK, Stop, serve, start
from servicekit.rpc import LIVENESS
from servicekit.settings import ServiceSettings


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop of these tests may take its time to end: else `serve` ends this process."""
    monkeypatch.setattr(lifecycle, "NOW_GRACE_S", 600.0)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


class Scripted:
    """A service whose loop is a function."""

    name = "scripted-0"
    kind = SessionKind.SCHEDULER

    def __init__(self, body: Callable[["Scripted", Stop], None]) -> None:
        self.body = body
        self.ready = False
        self.progress_ns = 0

    def run(self, stop: Stop) -> None:
        self.body(self, stop)

    def is_ready(self) -> bool:
        return self.ready

    def last_progress_ns(self) -> int:
        return self.progress_ns

    def status(self) -> status_pb2.ServiceStatus:
        return status_pb2.ServiceStatus(ready=self.ready)


def settings(**given: object) -> ServiceSettings:
    return ServiceSettings(**{"drain_timeout_s": 600.0, "log_format": "json", **given})  # type: ignore[arg-type]


def healthy(port: int, service: str = "") -> bool:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        reply = health_pb2_grpc.HealthStub(channel).Check(request, timeout=300, wait_for_ready=True)
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 180
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_a_loop_that_returns_ends_the_process_well() -> None:
    assert serve(Scripted(lambda _service, _stop: None), settings()) == EXIT_OK


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_fails_readiness_then_waits_for_what_is_in_flight(number: signal.Signals) -> None:
    (port,) = free_ports(1)
    seen = []

    def body(service: Scripted, stop: Stop) -> None:
        service.ready = True
        until(lambda: healthy(port))
        os.kill(os.getpid(), number)
        seen.append(stop.wait(300))
        until(lambda: not healthy(port))
        seen.extend([healthy(port, LIVENESS), stop.now.is_set()])

    assert serve(Scripted(body), settings(grpc_address=f"127.0.0.1:{port}")) == EXIT_OK
    assert seen == [True, True, False]


def test_now_comes_when_the_time_to_drain_is_over() -> None:
    seen = []

    def body(service: Scripted, stop: Stop) -> None:
        stop.drain()
        seen.append(stop.wait(300))  # draining already: waits for now
        seen.append(stop.now.is_set())

    assert serve(Scripted(body), settings(drain_timeout_s=0.05)) == EXIT_OK
    assert seen == [True, True]


def test_a_defect_is_logged_with_its_traceback_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    def body(service: Scripted, stop: Stop) -> None:
        raise ZeroDivisionError("by accident")

    assert serve(Scripted(body), settings()) == EXIT_FAILED
    last = json.loads(capsys.readouterr().err.splitlines()[-1])
    assert (last["event"], last["level"], last["service"], last["name"]) == (
        "failed",
        "error",
        "scheduler",
        "scripted-0",
    )
    assert "ZeroDivisionError: by accident" in last["exception"]


def test_what_keeps_a_service_from_starting_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    def body(service: Scripted, stop: Stop) -> None:
        raise PenstockError(ErrorCode.INTERNAL, "there is no model: name one")

    assert serve(Scripted(body), settings()) == EXIT_CANNOT_START
    shown = capsys.readouterr().err
    assert "cannot start: there is no model: name one" in shown
    assert "Traceback" not in shown


def test_the_same_error_from_a_service_that_was_ready_is_a_failure() -> None:
    (port,) = free_ports(1)

    def body(service: Scripted, stop: Stop) -> None:
        service.ready = True
        until(lambda: healthy(port))
        raise PenstockError(ErrorCode.INTERNAL, "the model went away")

    assert serve(Scripted(body), settings(grpc_address=f"127.0.0.1:{port}")) == EXIT_FAILED


def test_an_address_that_is_taken_keeps_it_from_starting(capsys: pytest.CaptureFixture[str]) -> None:
    def body(service: Scripted, stop: Stop) -> None:
        raise AssertionError("must not run")

    assert serve(Scripted(body), settings(grpc_address="203.0.113.1:1")) == EXIT_CANNOT_START
    assert "cannot listen on 203.0.113.1:1" in capsys.readouterr().err


def test_a_loop_that_stands_still_is_not_alive() -> None:
    (port,) = free_ports(1)

    def body(service: Scripted, stop: Stop) -> None:
        service.ready = True
        service.progress_ns = time.monotonic_ns() + 300 * 10**9  # however slow the machine is
        until(lambda: healthy(port, LIVENESS))
        service.progress_ns = time.monotonic_ns() - 11 * 10**9
        until(lambda: not healthy(port, LIVENESS))
        assert not healthy(port)

    assert serve(Scripted(body), settings(grpc_address=f"127.0.0.1:{port}")) == EXIT_OK


def test_a_main_loop_that_is_stuck_is_told_by_a_thread(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (port,) = free_ports(1)
    monkeypatch.setattr(lifecycle, "STALLED_AFTER_S", 0.3)
    seen = []

    class Stuck(Scripted):
        async def run(self, stop: Stop) -> None:  # type: ignore[override]
            self.ready = True
            while not await asyncio.to_thread(answers, 200):
                await asyncio.sleep(0.02)
            until(lambda: answers(503))  # blocks the loop that it runs in
            until(lambda: answers(503, "/ready"))
            seen.append(503)
            while not await asyncio.to_thread(answers, 200):
                await asyncio.sleep(0.02)
            seen.append(200)

    def answers(status: int, path: str = "/health") -> bool:
        return healthy_over_http(path) == status

    def healthy_over_http(path: str) -> int:
        return httpx.get(f"http://127.0.0.1:{port}{path}", timeout=300).status_code

    given = settings(metrics_address=f"127.0.0.1:{port}")
    assert serve(Stuck(lambda _service, _stop: None), given) == EXIT_OK
    assert seen == [503, 200]
    assert "stalled: the main loop made no progress" in capsys.readouterr().err


def test_a_service_that_cannot_say_how_it_is_is_told_to_end_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    class Mute(Scripted):
        def is_ready(self) -> bool:
            raise ZeroDivisionError

    seen = []

    def body(service: Scripted, stop: Stop) -> None:
        seen.append(stop.now.wait(300))
        raise ValueError("and it fails again")

    assert serve(Mute(body), settings()) == EXIT_FAILED
    assert seen == [True]
    shown = capsys.readouterr().err
    assert "ZeroDivisionError" in shown
    assert "and it fails again" in shown


def test_a_coroutine_runs_in_the_main_loop_and_is_told_the_same() -> None:
    seen: list[object] = []

    class Awaiting(Scripted):
        async def run(self, stop: Stop) -> None:  # type: ignore[override]
            seen.append(threading.current_thread() is threading.main_thread())
            seen.append(await stop.wait_async(0.01))
            asyncio.get_running_loop().call_later(0.05, os.kill, os.getpid(), signal.SIGTERM)
            seen.append(await stop.wait_async(20))
            seen.append(await stop.wait_async())

    assert serve(Awaiting(lambda _service, _stop: None), settings(drain_timeout_s=0.05)) == EXIT_OK
    assert seen == [True, False, True, True]


def test_stop_wakes_waiters_of_any_thread_and_loop() -> None:
    stop = Stop()

    async def waits() -> list[bool]:
        both = asyncio.gather(stop.wait_async(300), stop.wait_async(300))
        await asyncio.sleep(0)  # they wait: who begins to wait later waits for the end
        threading.Thread(target=stop.drain).start()
        first = await both
        threading.Timer(0.05, stop.end).start()
        return [*first, await stop.wait_async(300)]

    assert asyncio.run(waits()) == [True, True, True]
    assert stop.wait(300)


def test_a_sentence_and_no_traceback_from_a_main_that_cannot_start(capsys: pytest.CaptureFixture[str]) -> None:
    def main(argv: object) -> int:
        raise PenstockError(ErrorCode.INTERNAL, f"wrong installation: {argv}")

    assert start(main, ["--x"]) == EXIT_CANNOT_START
    assert capsys.readouterr().err.endswith(": wrong installation: ['--x']\n")


_STUBBORN = """
import sys, time
from servicekit.lifecycle import serve
from servicekit.settings import ServiceSettings
from tests.unit.servicekit.test_lifecycle import Scripted

def body(service, stop):
    service.ready = True
    time.sleep(120)

sys.exit(serve(Scripted(body), ServiceSettings(drain_timeout_s={drain}, log_format="json")))
"""


def stubborn(drain_timeout_s: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _STUBBORN.format(drain=drain_timeout_s)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    while '"ready"' not in process.stderr.readline():
        assert process.poll() is None
    return process


def test_a_second_signal_ends_a_process_that_does_not_drain() -> None:
    with stubborn(60) as process:
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        while "draining" not in process.stderr.readline():
            pass
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 128 + signal.SIGTERM


def test_a_loop_that_ignores_now_is_given_up() -> None:
    with stubborn(0.1) as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == EXIT_FAILED
