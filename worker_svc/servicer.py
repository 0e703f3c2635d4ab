"""`penstock.v1.Worker` over gRPC."""

from typing import Any, Protocol

from grpc import aio

from contract.v1 import worker_pb2, worker_pb2_grpc

Context = aio.ServicerContext[Any, Any]


class Worker(Protocol):
    """The questions of the servicer to the service, from the thread of the gRPC server."""

    def worker_status(self) -> worker_pb2.WorkerStatus:
        """The state at the moment."""

    def memory_profile(self) -> worker_pb2.MemoryProfile:
        """The uses of its memory.

        Raises:
            PenstockError: UNAVAILABLE, the model is still being loaded.
        """

    def drain(self) -> int:
        """Begin to end; how many plans are left to carry out."""


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    """The control service; errors leave through the server's interceptor."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def GetStatus(  # noqa: N802
        self,
        request: worker_pb2.GetWorkerStatusCall,  # noqa: ARG002
        context: Context,  # noqa: ARG002
    ) -> worker_pb2.WorkerStatus:
        """The state of the worker at the moment."""
        return self._worker.worker_status()

    async def ProfileMemory(  # noqa: N802
        self,
        request: worker_pb2.ProfileMemoryCall,  # noqa: ARG002
        context: Context,  # noqa: ARG002
    ) -> worker_pb2.MemoryProfile:
        """The uses of its memory."""
        return self._worker.memory_profile()

    async def Drain(  # noqa: N802
        self,
        request: worker_pb2.DrainWorkerCall,  # noqa: ARG002
        context: Context,  # noqa: ARG002
    ) -> worker_pb2.DrainWorkerReply:
        """The worker ends when the plans that it has are done."""
        return worker_pb2.DrainWorkerReply(plans_left=self._worker.drain())
