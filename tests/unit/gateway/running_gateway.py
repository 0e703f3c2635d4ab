import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import uvloop
from memory_bus import MemoryBus
from scripted_pipeline import ScriptedPipeline

from contract.v1 import inference_pb2_grpc
from gateway_svc.service import GatewayService
from servicekit.lifecycle import Stop
from servicekit.rpc import RpcServer, RpcService


def eventually(holds: Callable[[], bool], timeout_s: float = 180) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@dataclass
class RunningGateway:
    """A gateway with its servers, in a thread of its own."""

    bus: MemoryBus
    pipeline: ScriptedPipeline
    service: GatewayService
    stop: Stop = field(default_factory=Stop)
    grpc_port: int = 0
    thread: threading.Thread | None = None
    loop: asyncio.AbstractEventLoop | None = None
    failure: BaseException | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.service.http_port}"

    @property
    def grpc(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    def post(self, body: dict[str, Any], headers: dict[str, str] | None = None) -> socket.socket:
        """A client that has asked for a completion and reads nothing by itself."""
        client = socket.create_connection(("127.0.0.1", self.service.http_port), timeout=300)
        content = json.dumps(body).encode()
        lines = [f"{name}: {value}\r\n" for name, value in (headers or {}).items()]
        lines += ["content-type: application/json\r\n", f"content-length: {len(content)}\r\n"]
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\n{''.join(lines)}\r\n"
        client.sendall(head.encode() + content)
        return client

    def start(self) -> None:
        started = threading.Event()

        async def serve() -> None:
            self.loop = asyncio.get_running_loop()
            add = inference_pb2_grpc.add_InferenceServicer_to_server
            server = RpcServer([RpcService("penstock.v1.Inference", add, self.service.servicer())])
            self.grpc_port = await server.start("127.0.0.1:0")
            run = asyncio.create_task(self.service.run(self.stop))
            while not self.service.is_ready() and not run.done():
                await asyncio.sleep(0.005)
            started.set()
            try:
                await run
            finally:
                await server.stop(1)

        def body() -> None:
            try:
                with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                    runner.run(serve())
            except BaseException as error:  # noqa: BLE001  (raised by `close`)
                self.failure = error
                started.set()

        self.thread = threading.Thread(target=body, daemon=True)
        self.thread.start()
        assert started.wait(300)

    def close(self) -> None:
        self.stop.end()
        assert self.thread is not None
        self.thread.join(300)
        assert not self.thread.is_alive()
        if self.failure is not None:
            raise self.failure
