"""A rolling restart: one process after the other is told to end, and the next one when its replacement is ready."""

import asyncio
import os
import signal
import time

from bench.rig.chaos.killer import Blow
from bench.rig.chaos.pipeline import KINDS, ServedPipeline
from contract.domain.errors import PenstockError
from penstock.client import Client

REPLACED_WITHIN_S = 300.0
_PROBE_S = 0.1


async def roll(pipeline: ServedPipeline, replicas: int, how: str = "rolled") -> list[Blow]:
    """Replaces every process of the pipeline once, kind by kind; when each was told. `how` is what it suffers.

    Raises:
        TimeoutError: a replacement was not ready within five minutes.
    """
    blows = []
    for kind in KINDS:
        for index in range(replicas):
            name, began_ns = f"{kind}-{index}", time.time_ns()
            blows.append(Blow(kind, name, how, time.monotonic()))
            os.kill(pipeline.pids()[name], signal.SIGTERM)
            async with asyncio.timeout(REPLACED_WITHIN_S):
                while not await asyncio.to_thread(_is_replaced, pipeline, kind, name, began_ns):
                    await asyncio.sleep(_PROBE_S)
    return blows


def _is_replaced(pipeline: ServedPipeline, kind: str, name: str, since_ns: int) -> bool:
    """Return whether a process of this name that was started since then is ready, as a gateway sees it."""
    for gateway in pipeline.gateways():
        try:
            with Client(gateway.grpc_address, timeout_s=30.0) as client:
                sessions = client.pipeline().sessions
        except PenstockError:
            continue
        return any(
            (each.kind, each.name) == (kind, name)
            and each.alive
            and each.status.ready
            and each.status.started_unix_ns > since_ns
            for each in sessions
        )
    return False
