"""The statuses of a pool's services, for its picture."""

from contextlib import suppress

from google.protobuf.message import DecodeError

from contract.v1 import status_pb2
from gateway_svc.core.pipeline import HopReading, ServiceReading, WorkerBlocks
from gateway_svc.pipeline import PipelineReading
from servicekit.bus.calls import SessionInfo


def decode_services(reading: PipelineReading) -> list[ServiceReading]:
    """All services; one whose status cannot be read, since its version speaks otherwise, is told without figures."""
    return [_decode_service(each) for each in reading.sessions]


def _decode_service(session: SessionInfo) -> ServiceReading:
    status = status_pb2.ServiceStatus()
    with suppress(DecodeError):
        status = status_pb2.ServiceStatus.FromString(session.status)
    return ServiceReading(
        session.kind.value,
        session.name,
        _state(session, status),
        session.num_owned,
        status.note,
        dict(status.figures),
        [
            HopReading(each.hop, each.wait_p50_s, each.wait_p99_s, each.work_p50_s, each.work_p99_s, each.rate)
            for each in status.hops
        ],
        [
            WorkerBlocks(each.worker, each.num_blocks, each.group_size, each.used, each.cached)
            for each in status.block_maps
        ],
    )


def _state(session: SessionInfo, status: status_pb2.ServiceStatus) -> str:
    if not session.alive:
        return "gone"
    if status.draining:
        return "draining"
    return "ready" if status.ready else "not_ready"
