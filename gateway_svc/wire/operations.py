"""What workers and sessions say of themselves."""

from collections.abc import Iterable
from contextlib import suppress

from google.protobuf.message import DecodeError

from gateway_svc.pipeline import PipelineReading
from penstock.domain.errors import PoisonMessageError
from penstock.v1 import results_pb2, status_pb2
from servicekit.bus.calls import SessionInfo, SessionKind

_PRIORITIES = "takes_priorities"  # a figure of schedulers


def decode_worker(info: bytes) -> tuple[str, int]:
    """Model name and max_model_len of a registered worker.

    Raises:
        PoisonMessageError: not a WorkerInfo.
    """
    try:
        message = results_pb2.WorkerInfo.FromString(info)
    except DecodeError as error:
        raise PoisonMessageError(f"not a WorkerInfo: {error}") from error
    return message.model, message.max_model_len


def takes_priorities(sessions: Iterable[SessionInfo]) -> bool | None:
    """Return whether a living scheduler serves by priority; None: none has said so far what it does."""
    told = []
    for session in sessions:
        if session.kind is SessionKind.SCHEDULER and session.alive:
            with suppress(DecodeError):
                figures = status_pb2.ServiceStatus.FromString(session.status).figures
                if _PRIORITIES in figures:
                    told.append(bool(figures[_PRIORITIES]))
    return any(told) if told else None


def pipeline_status(reading: PipelineReading) -> status_pb2.PipelineStatus:
    """A pool's state as `GetPipeline` tells it."""
    return status_pb2.PipelineStatus(
        pool=reading.pool,
        sessions=[_session_status(each) for each in reading.sessions],
        streams=[status_pb2.StreamStatus(stream=name, length=length) for name, length in reading.lengths.items()],
    )


def _session_status(info: SessionInfo) -> status_pb2.SessionStatus:
    try:
        status = status_pb2.ServiceStatus.FromString(info.status)
    except DecodeError:
        status = status_pb2.ServiceStatus()  # of a version that speaks otherwise: it is shown without figures
    return status_pb2.SessionStatus(
        kind=info.kind.value,
        name=info.name,
        address=info.address,
        alive=info.alive,
        owned_requests=info.num_owned,
        status=status,
    )
