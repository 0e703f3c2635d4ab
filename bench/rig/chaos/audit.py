"""The books at the end of a round: what was served must have left nothing behind."""

import asyncio
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import grpc

from bench.rig.chaos.pipeline import KINDS, SERVER, RawServer, ServedPipeline
from contract.domain.errors import PenstockError
from contract.v1 import scheduler_pb2, scheduler_pb2_grpc, status_pb2
from penstock.client import Client
from servicekit.bus.keys import TOKENIZERS, Keys

if TYPE_CHECKING:  # it needs packages that only rounds with traces need
    from bench.rig.chaos.collector import Collector

CLEAN_WITHIN_S = 60.0
_PROBE_S = 0.5
_MAX_LOG_ENTRIES = 1  # the last one read
# What a pool without requests may hold, as `servicekit.bus.keys` names it; some of it only for a time, or empty.
_MAY_BE = frozenset(
    {
        *("survey", "changed", "gone", "leases", "shape", "models"),
        *("run", "term", "settle", "sessions", "sess", "workers", "worker", "steps", "results", "shards", "read"),
        *(
            "req",
            "out",
            "mark",
            "waiting",
            "prompts",
            "requests",
            "cancels",
            "bell",
            "tokens",
            "attach",
            "text",
            "dead",
            "traces",
        ),
    }
)


async def audit(
    pipeline: ServedPipeline,
    request_ids: Iterable[str],
    replicas: int,
    collector: "Collector | None" = None,
    *,
    pool: str = "",
    num_gateways: int | None = None,
) -> tuple[list[str], float]:
    """Look for what is left after all streams have ended, one sentence for each, and after how many seconds.

    Empty: the books are clean.

    Of gateways that serve several pools, `pool` is the one, and `num_gateways` all that serve it.

    The pipeline gets a minute for what takes it time: restarts, takeovers, cancels of requests without a client. A
    collector of traces must have been told of every request.
    """
    began_s = time.monotonic()
    wanted = list(request_ids)
    while True:
        leaks = await asyncio.to_thread(
            lambda: list(_leaks(pipeline, wanted, replicas, pool, num_gateways or replicas))
        )
        leaks += collector.wrongs(wanted) if collector else ()
        took_s = time.monotonic() - began_s
        if not leaks or took_s > CLEAN_WITHIN_S:
            return leaks, took_s
        await asyncio.sleep(_PROBE_S)


def _leaks(
    pipeline: ServedPipeline, request_ids: list[str], replicas: int, pool: str, num_gateways: int
) -> Iterator[str]:
    try:
        with Client(pipeline.gateways()[0].grpc_address, timeout_s=5.0) as client:
            status = client.pipeline(pool)
    except PenstockError as error:
        yield f"the first gateway does not answer: {error.message}"
        return
    alive = [session for session in status.sessions if session.alive]
    yield from _processes(pipeline, alive, replicas, num_gateways)
    yield from _figures(alive)
    server = pipeline.server()
    try:
        yield from _keys(server, request_ids)
    finally:
        server.close()


def _processes(
    pipeline: ServedPipeline, alive: list[status_pb2.SessionStatus], replicas: int, num_gateways: int
) -> Iterator[str]:
    for kind in KINDS:
        ready = [session.name for session in alive if session.kind == kind and session.status.ready]
        wanted = num_gateways if kind == "gateway" else replicas
        if len(ready) != wanted:
            yield f"{len(ready)} of {wanted} processes of {kind}_svc are ready"
    # Launcher and server belong to the pipeline too.
    running, known = len(pipeline.survivors()), len(KINDS) * replicas + 2
    if running != known:
        yield f"{running} processes run, {known} should"
    if SERVER not in pipeline.pids():
        yield "there is no server"


def _figures(alive: list[status_pb2.SessionStatus]) -> Iterator[str]:
    for session in alive:
        for figure in ("live_requests", "open_streams"):
            if session.status.figures.get(figure):
                yield f"{session.name}: {figure} {session.status.figures[figure]:g}"
        if session.kind != "scheduler":
            continue
        with grpc.insecure_channel(session.address) as channel:
            stub = scheduler_pb2_grpc.SchedulerStub(channel)
            try:
                books = stub.GetStatus(scheduler_pb2.GetSchedulerStatusCall(), timeout=5.0)
            except grpc.RpcError as error:
                yield f"{session.name} does not answer: {error}"
                continue
        figures = {"waiting": books.waiting, "running": books.running}
        for worker in books.workers:
            figures |= {f"{worker.worker} blocks": worker.used_blocks, f"{worker.worker} slots": worker.used_slots}
        yield from (f"{session.name}: {name} {number}" for name, number in figures.items() if number)


def _keys(server: RawServer, request_ids: list[str]) -> Iterator[str]:
    keys = Keys()
    prefix = keys.prefix.decode()
    found = [key.decode() for key in _list(server.command("KEYS", f"{prefix.replace('{', '?').replace('}', '?')}*"))]
    living = {key.rpartition(":")[2] for key in found if key.startswith(f"{prefix}sess:")}
    for key in found:
        kind, _, rest = key.removeprefix(prefix).partition(":")
        if kind not in _MAY_BE or (kind == "text" and rest not in living):
            yield f"{key} is left"
        elif kind == "waiting" and server.command("HGET", key, "requests") not in (b"0", None):
            yield f"{key} counts {server.command('HGET', key, 'requests')!r} requests"
        elif kind == "req" and server.command("HGET", key, "state") != b"ENDED":
            yield f"{key} is {server.command('HGET', key, 'state')!r}"
        elif kind in ("req", "out", "mark") and _number(server.command("PTTL", key)) < 0:
            yield f"{key} has no TTL"
        elif kind == "tokens" and (length := _number(server.command("XLEN", key))) > _MAX_LOG_ENTRIES:
            yield f"{key} has {length} entries"
    for stream in (keys.prompts, keys.requests, keys.dead, keys.traces):
        if length := _number(server.command("XLEN", stream)):
            yield f"{stream.decode()} has {length} entries"
    if keys.prompts.decode() in found:
        pending = _list(server.command("XPENDING", keys.prompts, TOKENIZERS))[0]
        if pending:
            yield f"{keys.prompts.decode()} has {pending!r} pending entries"
    for request_id in request_ids:
        if f"{prefix}out:{request_id}" not in found:
            yield f"{request_id} was accepted and has no result"


def _list(reply: object) -> list[bytes]:
    assert isinstance(reply, list)
    return reply


def _number(reply: object) -> int:
    assert isinstance(reply, int)
    return reply
