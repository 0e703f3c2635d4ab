"""Draws the boards of deploy/grafana from a real Prometheus that scrapes a real pipeline under a mixed load.

Three tenants call two workers that are simulated: chats with a common beginning, short prompts, and long ones that come
in a burst. Some clients leave. Meanwhile a worker, a detokenizer and a scheduler are killed, in this order. The exit
status is 1 if a panel has nothing to show or a request failed.

    pip install -e '.[pictures]'
    penstock bench boards --seconds 600 --folder docs/dashboards
"""

import argparse
import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

from bench.rig.boards import read_boards
from bench.rig.chaos.pipeline import EOS, ROOT, ServedPipeline
from bench.rig.machine import describe_machine
from bench.rig.prometheus import Prometheus, is_installed
from contract.domain.errors import ErrorCode, PenstockError
from contract.domain.params import SamplingParams
from penstock.client import Accepted, AsyncClient
from penstock.launcher.ports import free_ports

RULES = ROOT / "deploy" / "helm" / "penstock" / "files" / "prometheus-rules.yaml"
FLAGS = ("--step-ms=20", "--num-blocks=512", "--max-num-seqs=16", "--trust-tenant-header", "--log-level=warning")
SCRAPE_S = 5
RATE_INTERVAL = "30s"
POINTS = 150  # of each line
DEATHS = ((0.2, "worker-1"), (0.4, "detokenizer-0"), (0.6, "scheduler-0"))  # share of the time, who
BURST = (0.75, 1.0)  # share of the time
LEAVING = 0.05  # share of requests
_WRONG = 0.02
_MISTAKES = (ErrorCode.INVALID_ARGUMENT, ErrorCode.CONTEXT_LENGTH_EXCEEDED)


@dataclass(frozen=True)
class Tenant:
    """Tokens and requests of callers: their number and their kind."""

    name: str
    rate: float  # requests a second
    burst_rate: float
    prompt_tokens: tuple[int, int]
    common_tokens: int  # that all prompts begin with
    max_tokens: tuple[int, int]


TENANTS = (
    Tenant("chat", 3.0, 4.0, (40, 300), 256, (60, 200)),
    Tenant("search", 3.0, 6.0, (10, 60), 0, (10, 60)),
    Tenant("reports", 0.2, 2.0, (800, 3000), 0, (150, 300)),
)


@dataclass
class Counts:
    """Ends of the requests."""

    ended: int = 0
    left: int = 0
    refused: int = 0
    failed: int = 0


def main() -> int:
    """Runs the load and draws; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="for which there is load")
    parser.add_argument("--folder", type=Path, default=ROOT / "docs" / "dashboards", help="where pictures are put")
    parser.add_argument("--seed", type=int, default=1, help="of the requests")
    options = parser.parse_args()
    try:
        from bench.rig.board_pictures import draw  # noqa: PLC0415  (needs matplotlib, which nothing else does)
        from bench.rig.panel_pictures import Span  # noqa: PLC0415
    except ImportError as error:
        raise SystemExit(
            "matplotlib, which draws the pictures, is not installed: pip install -e '.[pictures]'"
        ) from error
    if not is_installed():
        raise SystemExit("prometheus is not installed: install Debian's package prometheus")
    print(describe_machine(), flush=True)
    (port,) = free_ports(1)
    with (
        tempfile.TemporaryDirectory(prefix="penstock-boards-") as folder,
        ServedPipeline(Path(folder) / "run", 2, [f"--metrics-port={port}", *FLAGS]) as pipeline,
        Prometheus(
            Path(folder) / "prometheus", port, scrape_s=SCRAPE_S, rules=RULES, labels={"namespace": "serving"}
        ) as prometheus,
    ):
        start_s = time.time()
        counts = asyncio.run(_load(pipeline, options.seconds, options.seed))
        end_s = start_s + options.seconds  # then all are told to leave
        print(f"{counts.ended} requests ended, {counts.left} left, {counts.refused} refused, {counts.failed} failed")
        options.folder.mkdir(parents=True, exist_ok=True)
        span = Span(start_s, end_s, max((end_s - start_s) / POINTS, 1.0), RATE_INTERVAL)
        num_empty = 0
        for board in read_boards():
            path = options.folder / f"{board.name}.png"
            empty = draw(board, prometheus, span, path)
            num_empty += len(empty)
            print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB{''.join(f'; no data: {each}' for each in empty)}")
    return int(bool(num_empty or counts.failed))


async def _load(pipeline: ServedPipeline, seconds: float, seed: int) -> Counts:
    """All tenants' requests for so long, and the deaths; those that still run at the end are left."""
    counts, calls = Counts(), set[asyncio.Task[None]]()
    begin_s = time.monotonic()
    clients = {
        tenant.name: [AsyncClient(gateway.grpc_address, tenant=tenant.name) for gateway in pipeline.gateways()]
        for tenant in TENANTS
    }

    async def come(tenant: Tenant, rng: random.Random) -> None:
        prompts = _prompts(tenant, rng)
        while (passed := (time.monotonic() - begin_s) / seconds) < 1.0:
            is_burst = BURST[0] <= passed < BURST[1]
            await asyncio.sleep(rng.expovariate(tenant.burst_rate if is_burst else tenant.rate))
            call = asyncio.create_task(_call(rng.choice(clients[tenant.name]), next(prompts), tenant, rng, counts))
            calls.add(call)
            call.add_done_callback(calls.discard)

    async def kill() -> None:
        for share, name in DEATHS:
            await asyncio.sleep(max(0.0, begin_s + share * seconds - time.monotonic()))
            os.kill(pipeline.pids()[name], signal.SIGKILL)
            print(f"{name} killed after {time.monotonic() - begin_s:.0f} s", flush=True)

    await asyncio.gather(kill(), *(come(tenant, random.Random(f"{seed} {tenant.name}")) for tenant in TENANTS))
    for call in list(calls):
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    for client in (each for many in clients.values() for each in many):
        await client.close()
    return counts


async def _call(client: AsyncClient, prompt: list[int], tenant: Tenant, rng: random.Random, counts: Counts) -> None:
    params = SamplingParams(
        temperature=1.0,
        seed=rng.randrange(2**31),
        max_tokens=rng.randint(*tenant.max_tokens),
        ignore_eos=rng.random() < 0.7,
    )
    if rng.random() < _WRONG:
        prompt = [EOS + 1000]  # no such token
    leaves_after = rng.randint(1, 60) if rng.random() < LEAVING else 0
    num_events = 0
    try:
        async with aclosing(client.generate(prompt, params)) as events:
            async for event in events:
                num_events += not isinstance(event, Accepted)
                if leaves_after and num_events >= leaves_after:
                    counts.left += 1
                    return
    except PenstockError as error:
        if error.code in _MISTAKES:
            counts.refused += 1
        else:
            counts.failed += 1
            print(f"{tenant.name}: {error}", flush=True)
    else:
        counts.ended += 1


def _prompts(tenant: Tenant, rng: random.Random) -> Iterator[list[int]]:
    common = [rng.randrange(EOS) for _ in range(tenant.common_tokens)]
    while True:
        yield common + [rng.randrange(EOS) for _ in range(rng.randint(*tenant.prompt_tokens))]


if __name__ == "__main__":
    sys.exit(main())
