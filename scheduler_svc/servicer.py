"""The gRPC control service."""

import time
from typing import Any

from contract.domain.errors import ErrorCode, PenstockError
from contract.domain.request import format_request_id, parse_request_id
from contract.v1 import scheduler_pb2, scheduler_pb2_grpc
from scheduler_svc.core.introspection import RequestInfo
from scheduler_svc.service import SchedulerService

DEFAULT_LIMIT = 1000


class SchedulerServicer(scheduler_pb2_grpc.SchedulerServicer):
    """`penstock.v1.Scheduler`. What it reads is a snapshot taken between two turns of the loop."""

    def __init__(self, service: SchedulerService) -> None:
        self._service = service

    async def GetStatus(  # noqa: N802
        self, _request: scheduler_pb2.GetSchedulerStatusCall, _context: Any
    ) -> scheduler_pb2.SchedulerStatus:
        """The state of the scheduler at the moment."""
        stats, incarnations = self._service.stats(), self._service.incarnations()
        books = [
            scheduler_pb2.WorkerBooks(
                worker=name,
                incarnation=incarnations.get(name, b""),
                num_blocks=worker.num_blocks,
                used_blocks=worker.num_used_blocks,
                cached_blocks=worker.num_cached_blocks,
                block_size=worker.block_size,
                used_slots=worker.num_running_seqs,
                num_slots=worker.num_slots,
                plans_in_flight=worker.num_plans_in_flight,
                step=worker.last_step,
            )
            for name, worker in stats.workers.items()
        ]
        return scheduler_pb2.SchedulerStatus(
            service=self._service.status(),
            workers=books,
            waiting=stats.num_waiting_seqs,
            running=stats.num_running_seqs,
            preemptions=stats.counters.num_preemptions,
        )

    async def GetBlockTable(  # noqa: N802
        self, request: scheduler_pb2.GetBlockTableCall, _context: Any
    ) -> scheduler_pb2.GetBlockTableReply:
        """The block tables of one request.

        Raises:
            PenstockError: INVALID_ARGUMENT for what is no request id, NOT_FOUND for a request that is not held here.
        """
        sequences = self._service.block_table(parse_request_id(request.request_id))
        if sequences is None:
            raise PenstockError(ErrorCode.NOT_FOUND, "this scheduler does not hold the request", param="request_id")
        return scheduler_pb2.GetBlockTableReply(
            sequences=[
                scheduler_pb2.SequenceBlocks(
                    sequence=sequence.sequence,
                    worker=sequence.worker_id,
                    slot=max(0, sequence.slot),
                    num_tokens=sequence.num_tokens,
                    num_computed_tokens=sequence.num_computed_tokens,
                    block_ids=sequence.block_ids,
                    ref_counts=sequence.ref_counts,
                    block_counts=sequence.block_counts,
                    first_blocks=sequence.first_blocks,
                )
                for sequence in sequences
                if sequence.status != "ended"
            ]
        )

    async def ListRequests(  # noqa: N802
        self, request: scheduler_pb2.ListRequestsCall, _context: Any
    ) -> scheduler_pb2.ListRequestsReply:
        """The requests that the scheduler holds, the running ones first."""
        held = sorted(self._service.list_requests(), key=lambda info: _state(info) != "running")
        now_ns = time.time_ns()
        return scheduler_pb2.ListRequestsReply(
            requests=[
                scheduler_pb2.HeldRequest(
                    request_id=format_request_id(info.request_id),
                    tenant=info.tenant,
                    priority=info.priority,
                    state=_state(info),
                    prompt_tokens=info.num_prompt_tokens,
                    output_tokens=info.num_output_tokens,
                    age_s=max(0.0, (now_ns - info.arrival_ns) / 1e9),
                    preemptions=info.num_preemptions,
                )
                for info in held[: request.limit or DEFAULT_LIMIT]
            ]
        )

    async def Drain(  # noqa: N802
        self, _request: scheduler_pb2.DrainSchedulerCall, _context: Any
    ) -> scheduler_pb2.DrainSchedulerReply:
        """Take no new requests; the process ends when those that it holds have ended."""
        return scheduler_pb2.DrainSchedulerReply(requests_left=self._service.drain())


def _state(info: RequestInfo) -> str:
    if any(sequence.status == "running" for sequence in info.sequences):
        return "running"
    return "preempted" if info.num_preemptions else "waiting"
