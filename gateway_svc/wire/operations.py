"""The status that workers and sessions tell."""

from collections import Counter
from collections.abc import Iterable
from contextlib import suppress

from google.protobuf.message import DecodeError

from contract.domain.errors import PenstockError, PoisonMessageError
from contract.domain.pooling import PLAIN_POOLING
from contract.v1 import results_pb2, status_pb2
from contract.wire.chat_facts import decode_chat_facts
from contract.wire.generation_defaults import decode_defaults
from contract.wire.model_kind import decode_model_kind
from contract.wire.pooling import decode_facts
from gateway_svc.core.models import ModelFacts, OfferedModel
from gateway_svc.core.stats import PoolLoad
from gateway_svc.pipeline import PipelineReading
from servicekit.bus.calls import SessionInfo, SessionKind
from servicekit.status import is_draining

_PRIORITIES = "takes_priorities"  # a figure of schedulers


def decode_worker(info: bytes) -> OfferedModel:
    """The model that a worker has registered.

    Raises:
        PoisonMessageError: not a WorkerInfo, or of a kind that this version does not know.
    """
    try:
        message = results_pb2.WorkerInfo.FromString(info)
    except DecodeError as error:
        raise PoisonMessageError(f"not a WorkerInfo: {error}") from error
    return OfferedModel(
        message.model,
        message.max_model_len,
        message.model_digest.hex(),
        message.block_size,
        message.num_blocks,
        decode_model_kind(message.kind),
    )


def count_sessions(sessions: Iterable[SessionInfo]) -> dict[tuple[str, str], int]:
    """Count sessions by kind and state, see `metrics.SESSION_STATES`."""
    return dict(Counter((each.kind.value, _state_of(each)) for each in sessions))


def pool_load(statuses: Iterable[bytes]) -> PoolLoad:
    """The sum of the loads that schedulers' statuses tell."""
    running = used = blocks = 0.0
    for status in statuses:
        with suppress(DecodeError):  # of a version that speaks otherwise
            figures = status_pb2.ServiceStatus.FromString(status).figures
            running += figures.get("running", 0)
            used += figures.get("blocks_used", 0)
            blocks += figures.get("blocks_total", 0)
    return PoolLoad(round(running), round(used), round(blocks))


def _state_of(session: SessionInfo) -> str:
    if session.alive:
        return "draining" if is_draining(session.status) else "alive"
    return "left" if session.left else "dead"


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


def told_facts(sessions: Iterable[SessionInfo]) -> ModelFacts | None:
    """The facts that living tokenizers tell of their model; None: nobody tells them now."""
    for session in sessions:
        if session.kind is SessionKind.TOKENIZER and session.alive:
            with suppress(DecodeError, PenstockError, PoisonMessageError):  # of a version that speaks otherwise
                status = status_pb2.ServiceStatus.FromString(session.status)
                if status.HasField("generation_defaults"):
                    pooling = decode_facts(status.pooling) if status.HasField("pooling") else PLAIN_POOLING
                    return ModelFacts(
                        decode_defaults(status.generation_defaults), decode_chat_facts(status.chat), pooling
                    )
    return None


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
