"""All five services in one process, each loop in a thread, on one bus; a real gRPC client calls the gateway."""

import asyncio
import inspect
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from memory_bus import MemoryBus

from contract.v1 import inference_pb2_grpc
from detokenizer_svc.service import DetokenizerService
from detokenizer_svc.settings import DetokenizerSettings
from gateway_svc.service import GatewayService
from gateway_svc.settings import GatewaySettings
from penstock.client import Client
from scheduler_svc.service import SchedulerService
from scheduler_svc.settings import SchedulerSettings
from servicekit.bus import Bus
from servicekit.lifecycle import Stop
from servicekit.rpc import RpcServer, RpcService
from tokenizer_svc.core.tokenize import PromptTokenizer
from tokenizer_svc.loading import load_vocabulary
from tokenizer_svc.service import TokenizerService
from tokenizer_svc.servicer import rpc_service
from tokenizer_svc.settings import TokenizerSettings
from worker_svc.loading import LoadedWorker, load_worker
from worker_svc.service import WorkerService
from worker_svc.settings import WorkerSettings

T = TypeVar("T")
READY_TIMEOUT_S = 900.0
END_TIMEOUT_S = 900.0


def wait_until(condition: Callable[[], bool], timeout_s: float = READY_TIMEOUT_S) -> None:
    """Fails if it does not come true in time."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@dataclass
class Running:
    """A service in its thread."""

    service: Any
    stop: Stop = field(default_factory=Stop)
    error: BaseException | None = None
    grpc_port: int = 0

    def __post_init__(self) -> None:
        body = self._run_in_loop if inspect.iscoroutinefunction(self.service.run) else self._run_blocking
        self.thread = threading.Thread(target=self._guarded, args=(body,), name=self.service.kind.value, daemon=True)

    def _guarded(self, body: Any) -> None:
        try:
            body()
        except BaseException as error:  # noqa: BLE001  (told by `Pipeline`)
            self.error = error

    def _run_blocking(self) -> None:
        self.service.run(self.stop)

    def _run_in_loop(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        inference = RpcService(
            "penstock.v1.Inference", inference_pb2_grpc.add_InferenceServicer_to_server, self.service.servicer()
        )
        server = RpcServer([inference])
        self.grpc_port = await server.start("127.0.0.1:0")
        try:
            await self.service.run(self.stop)
        finally:
            await server.stop(0.2)


class TokenizerPort:
    """The gRPC port of a tokenizer, in a thread: gateways ask there what needs a vocabulary alone."""

    def __init__(self, prompts: PromptTokenizer) -> None:
        """Listens already."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tokenizer's gRPC", daemon=True)
        self._thread.start()
        self._server, port = self._run(self._start(prompts))
        self.address = f"127.0.0.1:{port}"

    def close(self) -> None:
        self._run(self._server.stop(0))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(END_TIMEOUT_S)
        self._loop.close()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(END_TIMEOUT_S)

    async def _start(self, prompts: PromptTokenizer) -> tuple[RpcServer, int]:
        server = RpcServer([rpc_service(prompts)])
        return server, await server.start("127.0.0.1:0")


class Pipeline:
    """A pool that is ready when the `with` begins.

    Args:
        model: checkpoint directory.
        bus: where the services meet; None: memory.
        scheduler: settings of the scheduler.
        worker: settings of the worker.
        gateway: settings of the gateway.
        every: settings of all services.
        load: makes the worker's runner.
    """

    def __init__(
        self,
        model: Path,
        *,
        bus: Bus | None = None,
        scheduler: dict[str, Any] | None = None,
        worker: dict[str, Any] | None = None,
        gateway: dict[str, Any] | None = None,
        every: dict[str, Any] | None = None,
        load: Callable[[WorkerSettings], LoadedWorker] = load_worker,
    ) -> None:
        self.bus = bus or MemoryBus()
        name = str(model)
        # All services share a process that may stand still for seconds: none is to be taken for dead or hung.
        every = {"session_ttl_s": 15.0, **(every or {})}
        worker = {"step_timeout_s": 300.0, **(worker or {})}
        gateway = {"outage_patience_s": 60.0, **(gateway or {})}
        vocabulary = load_vocabulary(name, max_model_len=worker.get("max_model_len"))
        self.scheduler = SchedulerService(SchedulerSettings(name="scheduler", **every | (scheduler or {})), self.bus)
        self.worker = WorkerService(WorkerSettings(name="worker", model=name, **every | worker), self.bus, load)
        self.detokenizer = DetokenizerService(
            DetokenizerSettings(name="detokenizer", model=name, **every), self.bus, vocabulary.tokenizer
        )
        self._port = TokenizerPort(PromptTokenizer(vocabulary))
        self.tokenizer = TokenizerService(
            TokenizerSettings(name="tokenizer", model=name, grpc_address=self._port.address, **every),
            self.bus,
            vocabulary,
        )
        self.gateway = GatewayService(
            GatewaySettings(name="gateway", http_address="127.0.0.1:0", **every | gateway), self.bus
        )
        self._exits = ExitStack()
        self.running = [
            Running(service)
            for service in (self.detokenizer, self.worker, self.scheduler, self.tokenizer, self.gateway)
        ]

    def __enter__(self) -> "Pipeline":
        for each in self.running:
            each.thread.start()
        self.wait_ready()
        self.client = self._exits.enter_context(Client(f"127.0.0.1:{self.running[-1].grpc_port}"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._exits.close()
        # In the order of the stream, so that each finds the next one alive while it drains.
        for each in self.running[::-1]:
            each.stop.drain()
            each.thread.join(END_TIMEOUT_S)
            assert not each.thread.is_alive(), f"{each.service.kind.value} did not drain"
        self._port.close()
        self._check()

    def wait_ready(self) -> None:
        """Until every service takes work; a machine that is short of time may have let a session lapse."""
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        while not all(each.service.is_ready() for each in self.running):
            self._check()
            assert time.monotonic() < deadline_s, [each.service.is_ready() for each in self.running]
            time.sleep(0.01)

    def _check(self) -> None:
        for each in self.running:
            if each.error is not None:
                raise each.error
