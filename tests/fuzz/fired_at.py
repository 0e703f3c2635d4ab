"""The whole pipeline in one process, with the gRPC servers of all services, to be fired at."""

import asyncio
import threading
from pathlib import Path
from typing import Any

from in_memory import END_TIMEOUT_S, Pipeline

from contract.domain.params import SamplingParams
from contract.v1 import scheduler_pb2_grpc, worker_pb2_grpc
from detokenizer_svc import servicer as detokenizer_servicer
from scheduler_svc.servicer import SchedulerServicer
from servicekit.bus import keys as k
from servicekit.bus.calls import Append, ListSessions, SessionKind
from servicekit.rpc import RpcServer, RpcService
from tokenizer_svc import servicer as tokenizer_servicer
from worker_svc.servicer import WorkerServicer

WORKER = {"runner": "simulated", "step_ms": 0.2, "block_size": 4, "num_blocks": 400, "max_num_seqs": 32}
HEALTHY = SamplingParams(temperature=0, max_tokens=6)


class FiredAt(Pipeline):
    """A pipeline that must survive; the services behind the gateway are at `control_port`."""

    def __init__(self, model: Path) -> None:
        super().__init__(model, worker=WORKER, scheduler={"scheduling_policy": "priority"})
        self.control_port = 0
        self._over = threading.Event()
        self._control = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self.connection = self.bus.connect()

    def __enter__(self) -> "FiredAt":
        super().__enter__()
        started = threading.Event()
        self._started = started
        self._control.start()
        assert started.wait(END_TIMEOUT_S)
        return self

    def __exit__(self, *_: Any) -> None:
        self._over.set()
        self._control.join(END_TIMEOUT_S)
        self._exits.close()
        for each in self.running[::-1]:
            each.stop.end()  # what garbage has opened need not end
            each.thread.join(END_TIMEOUT_S)
            assert not each.thread.is_alive(), f"{each.service.kind.value} hangs"
        self._port.close()
        self._check()

    async def _serve(self) -> None:
        server = RpcServer(
            [
                RpcService(
                    "penstock.v1.Scheduler",
                    scheduler_pb2_grpc.add_SchedulerServicer_to_server,
                    SchedulerServicer(self.scheduler),
                ),
                RpcService(
                    "penstock.v1.Worker", worker_pb2_grpc.add_WorkerServicer_to_server, WorkerServicer(self.worker)
                ),
                tokenizer_servicer.rpc_service(self.tokenizer.prompts),
                detokenizer_servicer.rpc_service(self.detokenizer.followers),
            ]
        )
        self.control_port = await server.start("127.0.0.1:0")
        self._started.set()
        await asyncio.to_thread(self._over.wait)
        await server.stop(0.2)

    @property
    def gateway_port(self) -> int:
        """Of its gRPC server."""
        return self.running[-1].grpc_port

    @property
    def url(self) -> str:
        """Of its HTTP server."""
        return f"http://127.0.0.1:{self.gateway.http_port}"

    def put(self, stream: bytes, fields: dict[bytes, bytes]) -> None:
        """An entry into a stream."""
        self.connection.call(Append(stream, fields))

    def gateway_session(self) -> bytes:
        """The session that text goes to."""
        sessions = self.connection.call(ListSessions())
        return next(each.sid for each in sessions if each.kind is SessionKind.GATEWAY)

    def dead_letters(self) -> int:
        """How many messages were counted as unreadable, by all services."""
        return (
            self.gateway.stats.num_dead_letters
            + sum(self.scheduler.meters.dead_letters.values())
            + sum(self.detokenizer.stats().dead_letters.values())
            + self.tokenizer._stats.num_dead_letters
            + self.worker._stats.num_dead_letters
        )

    def check_alive(self, number: int = 0) -> None:
        """No service has failed, and a healthy request is served."""
        self.wait_ready()
        generation = self.client.complete([number % 250, 2, 3], HEALTHY, timeout_s=120)
        assert len(generation.outputs[0].token_ids) == HEALTHY.max_tokens
        self._check()


PAYLOAD = k.PAYLOAD
