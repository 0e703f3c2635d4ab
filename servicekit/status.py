"""The status of a process: in its session, for the other processes and `penstock status`, and over gRPC."""

import time
from collections.abc import Iterable, Mapping
from typing import TypeAlias

from google.protobuf.message import DecodeError

from contract import __version__
from contract.v1 import status_pb2
from servicekit.hops import Hop

ServiceStatus: TypeAlias = status_pb2.ServiceStatus


def service_status(
    *,
    ready: bool,
    draining: bool,
    started_ns: int,
    figures: Mapping[str, float],
    hops: Iterable[Hop],
    model_digest: str = "",
    note: str = "",
) -> ServiceStatus:
    """Of this version, now.

    Args:
        ready: whether it takes new work.
        draining: whether it is about to end.
        started_ns: Unix time, nanoseconds.
        figures: by the names under which they are shown.
        hops: what it receives.
        model_digest: of a worker, 16 hexadecimal digits.
        note: why it takes no new work, and what to do about it.
    """
    now_ns = time.time_ns()
    return ServiceStatus(
        ready=ready,
        draining=draining,
        started_unix_ns=started_ns,
        version=__version__,
        figures=figures,
        hops=[hop.status(now_ns) for hop in hops],
        model_digest=model_digest,
        note=note,
    )


def is_draining(status: bytes) -> bool:
    """Return whether a service has said so of itself; one that says nothing readable stays."""
    try:
        return ServiceStatus.FromString(status).draining
    except DecodeError:
        return False
