"""From start-up to exit status: what is the same for every service.

The main thread runs an asyncio loop (uvloop) with the gRPC server; the metrics endpoint has a thread; the service's
`run` has a thread of its own, or is a coroutine in the loop. Another thread watches the main loop, which could not say
that it is stuck; then the metrics endpoint does. SIGTERM or SIGINT: readiness fails at once and `draining`
is set; `run` returns when it has drained, and is told `now` when `drain_timeout_s` is over. Then everything closes in
order. A second signal ends the process at once.
"""

import asyncio
import gc
import inspect
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Protocol

import structlog
import uvloop
from prometheus_client.registry import Collector

from contract.domain.errors import PenstockError
from servicekit import logs
from servicekit.bus.calls import SessionKind
from servicekit.metrics import HealthEndpoint, MetricsEndpoint, make_registry
from servicekit.rpc import RpcServer, RpcService
from servicekit.settings import ServiceSettings
from servicekit.stall import StallWatch
from servicekit.status import ServiceStatus
from servicekit.tls import open_identity

EXIT_OK = 0
EXIT_FAILED = 1  # a defect: the log has a traceback
EXIT_CANNOT_START = 2  # the installation or the settings are wrong: the log has a sentence

STALLED_AFTER_S = 7.5  # a health check every other second finds it within 10 s
WATCH_INTERVAL_S = 0.25
NOW_GRACE_S = 5.0  # how long `run` may take to return once `now` is set
RPC_GRACE_S = 2.0
GARBAGE_THRESHOLD = 10_000  # new objects between two looks for garbage: once in a burst of requests, not often

_logger = structlog.stdlib.get_logger(__name__)


class Stop:
    """The order to end: first `draining`, later `now`. Any thread may ask and be asked."""

    def __init__(self) -> None:
        self.draining = threading.Event()  # finish what is in flight, take nothing new, then return
        self.now = threading.Event()  # the time to drain is over: return
        self._lock = threading.Lock()
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def drain(self) -> None:
        """Begins the end; again is harmless."""
        self.draining.set()
        self._wake()

    def end(self) -> None:
        """Ends the draining."""
        self.draining.set()
        self.now.set()
        self._wake()

    def wait(self, seconds: float) -> bool:
        """Sleeps at most so long; True, and earlier, if the next stage began: draining, or now if it was draining."""
        return (self.now if self.draining.is_set() else self.draining).wait(seconds)

    async def wait_async(self, seconds: float | None = None) -> bool:
        """As `wait`, for a coroutine; None: as long as it takes."""
        stage = self.now if self.draining.is_set() else self.draining
        entry = (asyncio.get_running_loop(), asyncio.Event())
        with self._lock:
            self._waiters.append(entry)
        try:
            if not stage.is_set():
                await asyncio.wait_for(entry[1].wait(), seconds)
        except TimeoutError:
            pass
        finally:
            with self._lock:
                self._waiters.remove(entry)
        return stage.is_set()

    def _wake(self) -> None:
        with self._lock:
            for loop, event in self._waiters:
                loop.call_soon_threadsafe(event.set)


class Service(Protocol):
    """The protocol that the shell of a service implements. All but `run` may be called from any thread at any time."""

    @property
    def name(self) -> str:
        """The name by which people call this process."""
        ...

    @property
    def kind(self) -> SessionKind:
        """The kind of service."""
        ...

    def run(self, stop: Stop) -> Awaitable[None] | None:
        """Serves until it has drained. Blocks in a thread of its own, or is an `async def` for the main loop.

        Raises:
            PenstockError: before it was ever ready: it cannot start, the message says why and what to do.
            Exception: a defect; the process ends with status 1.
        """
        ...

    def is_ready(self) -> bool:
        """Return whether it takes new work."""
        ...

    def last_progress_ns(self) -> int:
        """`time.monotonic_ns()` of the last turn of its loop, idle turns included; 0: the loop has not begun."""
        ...

    def status(self) -> ServiceStatus:
        """The status that it tells."""
        ...


def serve(
    service: Service,
    settings: ServiceSettings,
    servicers: Sequence[RpcService] = (),
    collectors: Sequence[Collector] = (),
) -> int:
    """Runs a service until it ends; must be called in the main thread. Answers the exit status."""
    logs.configure(settings.log_level, settings.log_format, service=service.kind.value, name=service.name)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_Process(service, settings, servicers, collectors).run())


def start(main: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    """Calls a service's `main`; what keeps it from starting becomes one sentence and the exit status 2."""
    try:
        return main(argv)
    except PenstockError as error:
        # As `python -m`, its module is `__main__`; its file lies in the service's package either way.
        sys.stderr.write(f"{Path(inspect.getfile(main)).parent.name}: {error.message}\n")
        return EXIT_CANNOT_START


class _Process:
    """One call of `serve`."""

    def __init__(
        self,
        service: Service,
        settings: ServiceSettings,
        servicers: Sequence[RpcService],
        collectors: Sequence[Collector],
    ) -> None:
        self._service = service
        self._settings = settings
        self._servicers = servicers
        self._collectors = collectors
        self._stop = Stop()
        self._is_ready = False
        self._is_progressing = True  # the service
        self._turned_s = 0.0  # when the main loop last looked, monotonic
        self._is_stuck = False  # the main loop, as a thread sees it
        self._has_ended = threading.Event()
        self._was_ready = False
        self._error: Exception | None = None

    @property
    def is_ready(self) -> bool:
        """Return whether it takes new work."""
        return self._is_ready and self.is_alive

    @property
    def is_alive(self) -> bool:
        """Return whether its loops make progress."""
        return self._is_progressing and not self._is_stuck

    async def run(self) -> int:
        settings = self._settings
        tls = open_identity(settings.tls_files)
        endpoint: MetricsEndpoint | None = None
        health: HealthEndpoint | None = None
        server = RpcServer(self._servicers, settings.control_token, tls)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            if settings.metrics_address:
                registry = make_registry(self._collectors)
                endpoint = MetricsEndpoint(settings.metrics_address, registry, self, settings.metrics_token, tls)
            if settings.health_address:
                health = HealthEndpoint(settings.health_address, self)
            if settings.grpc_health_address:
                await server.start_health(settings.grpc_health_address)
            port = await server.start(settings.grpc_address)
            _logger.info("started", grpc_port=port, metrics_port=endpoint.port if endpoint else None, pid=os.getpid())
            await self._run_watched(server)
            self._is_ready = False
            await server.set_health(ready=False, alive=True)
        except Exception as error:  # noqa: BLE001
            self._error = error
        finally:
            self._has_ended.set()
            await server.stop(RPC_GRACE_S)
            for each in (endpoint, health):
                if each:
                    await asyncio.to_thread(each.close)
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
        return self._exit_status()

    async def _run_watched(self, server: RpcServer) -> None:
        """Until `run` ends, or what watches it fails; raises what they raised."""
        work = asyncio.create_task(self._run_service())
        others = {asyncio.create_task(self._watch(server)), asyncio.create_task(self._bound_draining())}
        done: set[asyncio.Task[None]] = set()
        try:
            done, _ = await asyncio.wait({work, *others}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in others:
                task.cancel()
            if not work.done():
                self._stop.end()
                await asyncio.wait({work}, timeout=NOW_GRACE_S)
            if work.done() and work not in done and (error := work.exception()):
                _logger.error("the service failed while it was told to end", exc_info=error)

    async def _run_service(self) -> None:
        if inspect.iscoroutinefunction(self._service.run):
            await self._service.run(self._stop)
            return
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()

        def body() -> None:
            try:
                self._service.run(self._stop)
            except Exception as error:  # noqa: BLE001
                loop.call_soon_threadsafe(ended.set_exception, error)
            else:
                loop.call_soon_threadsafe(ended.set_result, None)

        # A daemon: a thread that hangs must not keep the process from ending.
        threading.Thread(target=body, name=self._service.kind.value, daemon=True).start()
        await ended

    async def _watch(self, server: RpcServer) -> None:
        """Keeps the health service true: at once when draining begins, otherwise a few times a second."""
        known: tuple[bool, bool] | None = None
        watch = StallWatch(STALLED_AFTER_S)
        self._turned_s = time.monotonic()
        threading.Thread(target=self._watch_main_loop, name="watch", daemon=True).start()
        while True:
            ready = self._service.is_ready() and not self._stop.draining.is_set()
            progress_ns = self._service.last_progress_ns()
            now_s = self._turned_s = time.monotonic()
            alive = not watch.is_stalled(progress_ns / 1e9 or now_s, now_s)
            self._is_ready, self._is_progressing = ready, alive
            if (ready, alive) != known:
                await server.set_health(ready=ready and alive, alive=alive)
                if known and known[1] and not alive:
                    _logger.error("stalled: the loop made no progress", seconds=STALLED_AFTER_S)
                if ready and not self._was_ready:
                    _logger.info("ready")
                    # What was loaded stays: to look through all of it for garbage takes tens of milliseconds.
                    gc.freeze()
                    gc.set_threshold(GARBAGE_THRESHOLD)
                self._was_ready |= ready
                known = (ready, alive)
            if await self._stop.wait_async(WATCH_INTERVAL_S) and self._stop.now.is_set():
                await asyncio.sleep(WATCH_INTERVAL_S)

    def _watch_main_loop(self) -> None:
        watch = StallWatch(STALLED_AFTER_S)
        while not self._has_ended.wait(WATCH_INTERVAL_S):
            is_stuck = watch.is_stalled(self._turned_s, time.monotonic())
            if is_stuck and not self._is_stuck:
                _logger.error("stalled: the main loop made no progress", seconds=STALLED_AFTER_S)
            self._is_stuck = is_stuck

    async def _bound_draining(self) -> None:
        while not self._stop.draining.is_set():
            await self._stop.wait_async()
        _logger.info("draining", timeout_s=self._settings.drain_timeout_s)
        await asyncio.sleep(self._settings.drain_timeout_s)
        _logger.warning("drain timeout: ending with work in flight", timeout_s=self._settings.drain_timeout_s)
        self._stop.end()
        await asyncio.sleep(NOW_GRACE_S)
        _logger.error("the service does not end: giving up", grace_s=NOW_GRACE_S)
        os._exit(EXIT_FAILED)

    def _on_signal(self, number: signal.Signals) -> None:
        if self._stop.draining.is_set():
            _logger.warning("second signal: exiting at once", signal=number.name)
            os._exit(128 + number)
        self._stop.drain()

    def _exit_status(self) -> int:
        if self._error is None:
            _logger.info("ended")
            return EXIT_OK
        if isinstance(self._error, PenstockError) and not self._was_ready:
            _logger.error("cannot start: %s", self._error.message)
            return EXIT_CANNOT_START
        _logger.error("failed", exc_info=self._error)
        return EXIT_FAILED
