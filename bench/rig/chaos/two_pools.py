"""Two pools, each with a server and services of its own, and all gateways of both before both.

The second pool has another model, so that an answer from the wrong one is a changed one. After the blows the second
server stands still for a while: calls for the first pool must not notice.
"""

import argparse
import asyncio
import json
import os
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from bench.rig.chaos.audit import audit
from bench.rig.chaos.bombs import Replies
from bench.rig.chaos.killer import Blow, Killer
from bench.rig.chaos.load import CUT_SHORT, Book, Caller, follow_for_ever
from bench.rig.chaos.pipeline import READY_TIMEOUT_S, SERVER, Gateway, ServedPipeline
from bench.rig.chaos.recipes import Recipe
from bench.rig.chaos.reference import undisturbed
from bench.rig.chaos.stories import End, Story
from bench.rig.chaos.table import Round, render
from bench.rig.chaos.verdict import judge
from bench.rig.chaos.workers import SECOND_SEED
from contract.domain.request import parse_request_id
from penstock.client import Client

NAMES = ("first", "second")  # of the pools and of their models
AWAY_S = 15.0  # longer than a gateway waits before it says 503
CALM_S = 3.0  # around that
_LOOK_S = 0.2
_SETTLE_S = 120.0


@dataclass
class Site:
    """One of the two."""

    name: str
    pipeline: ServedPipeline
    file: Path  # of the pools that its gateways serve

    @property
    def gateways(self) -> list[Gateway]:
        """Those that it runs, by names that the other's do not have."""
        return [replace(each, name=f"{self.name} {each.name}") for each in self.pipeline.gateways()]

    def entry(self, of: "Site") -> dict[str, object]:
        """A pool as its file has it; its own server is where its gateways look by themselves."""
        where = {} if of is self else {"redis_url": of.pipeline.redis_url}
        return {"name": of.name, "pool": "penstock", "models": [of.name], **where}

    def write(self, sites: Sequence["Site"]) -> None:
        """Tells its gateways of pools."""
        new = self.file.with_suffix(".new")
        new.write_text("".join(json.dumps(self.entry(each)) + "\n" for each in sites), "utf-8")
        new.rename(self.file)


def run(folder: Path, recipes: Sequence[Recipe], flags: Sequence[str], options: argparse.Namespace) -> int:
    """One round; the exit status."""
    with ExitStack() as stack:
        sites = []
        for name in NAMES:
            file = folder / f"{name}.jsonl"
            file.write_text(json.dumps({"name": name, "pool": "penstock", "models": [name]}) + "\n", "utf-8")
            seed = 0 if name == NAMES[0] else SECOND_SEED
            own = [f"--pools={file}", f"--simulated-seed={seed}", *flags]
            has_proxy = "silent" in options.hows.split(",")
            # Of two families: clients of one are not told in the words of the other.
            chats = "hermes" if name == NAMES[0] else "harmony"
            pipeline = ServedPipeline(folder / name, options.replicas, own, has_proxy=has_proxy, chats=chats)
            sites.append(Site(name, stack.enter_context(pipeline), file))
        for site in sites:
            site.write(sites)
        try:
            return asyncio.run(_round(sites, recipes, options))
        finally:
            if options.log:
                options.log.write_text("".join(f"{site.name}\n{site.pipeline.log}" for site in sites), "utf-8")


async def _round(sites: Sequence[Site], recipes: Sequence[Recipe], options: argparse.Namespace) -> int:
    gateways = [gateway for site in sites for gateway in site.gateways]
    await asyncio.to_thread(_wait_for_models, gateways)
    seeds = (0, SECOND_SEED)
    models = [
        await undisturbed(Caller(gateways, model=site.name), recipes, seed)
        for site, seed in zip(sites, seeds, strict=True)
    ]
    began_s = time.monotonic()
    books = [Book() for _ in sites]
    clients = [
        asyncio.create_task(
            follow_for_ever(recipes, gateways, options.seed * 1000 + index, books[index % 2], NAMES[index % 2])
        )
        for index in range(options.clients)
    ]
    await asyncio.sleep(CALM_S)
    killers = [
        Killer(
            site.pipeline,
            kinds=options.kinds.split(","),
            hows=options.hows.split(","),
            replicas=options.replicas,
            every_s=2 * options.every_s,
            seed=options.seed + index,
        )
        for index, site in enumerate(sites)
    ]
    await asyncio.gather(*(killer.run((options.kills + 1) // 2, options.seconds) for killer in killers))
    # A gateway that was killed last is away for clients of both pools until it is started again. One that never is will
    # be missed by the audit.
    whole_until_s = time.monotonic() + READY_TIMEOUT_S
    while not all(killer.is_whole(SERVER) for killer in killers) and time.monotonic() < whole_until_s:
        await asyncio.sleep(_LOOK_S)
    away = await _stand_still(sites[1])
    for book in books:
        book.is_closed = True
    await asyncio.gather(*clients)
    seconds = time.monotonic() - began_s
    blows = [_named(blow, site) for site, killer in zip(sites, killers, strict=True) for blow in killer.blows]
    status = 0
    for site, book, model in zip(sites, books, models, strict=True):
        # Who asks for a pool whose server is away is told so: by design, and of that pool alone.
        told = [story for story in book.stories if site is sites[1] and _is_told(story, away)]
        stories = [story for story in book.stories if story not in told]
        verdict = judge(stories, [model], blows)
        ids = [parse_request_id(story.request_id).hex() for story in stories if story.request_id]
        num_gateways = options.replicas * len(sites)
        leaks, clean_s = await audit(site.pipeline, ids, options.replicas, pool=site.name, num_gateways=num_gateways)
        print(f"pool {site.name}", flush=True)
        print(render(Round(options.seed, seconds, stories, blows, verdict, leaks, clean_s, Replies())), flush=True)
        status |= bool(verdict.num_wrong or leaks)
        if site is sites[0]:
            live = [story for story in stories if story.begun_s < away[1] and story.ended_s > away[0]]
            wrong = [story for story in live if _has_noticed(story, away[0])]
            print(f"          {len(live)} streams while the other server was away; {len(wrong)} had an error")
            print("\n".join(f"          {story.end.value} {story.error}" for story in wrong[:20]))
            status |= bool(wrong) or not live
        else:
            print(f"          {len(told)} calls were told that the server is away")
    return status


async def _stand_still(site: Site) -> tuple[float, float]:
    """Stops a site's server for a while, when all else is well; from when to when."""
    await asyncio.sleep(2 * CALM_S)
    pid = site.pipeline.pids()[SERVER]
    began_s = time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(AWAY_S)
    finally:
        os.kill(pid, signal.SIGCONT)
    ended_s = time.monotonic()
    await asyncio.sleep(2 * CALM_S)
    return began_s, ended_s


def _is_told(story: Story, away: tuple[float, float]) -> bool:
    """Return whether a call was not taken while its server was away."""
    return story.end is End.REFUSED and story.begun_s < away[1] + CALM_S and story.ended_s > away[0]


def _has_noticed(story: Story, since_s: float) -> bool:
    """Return whether a call has had an error since then; a connection that its own client drops is none."""
    errors = [error for at_s, error in story.errors if at_s >= since_s and error != CUT_SHORT]
    return story.end not in (End.DONE, End.LEFT) or bool(errors)


def _named(blow: Blow, site: Site) -> Blow:
    return replace(blow, name=f"{site.name} {blow.name}")


def _wait_for_models(gateways: Sequence[Gateway]) -> None:
    """Until each gateway serves both."""
    until_s = time.monotonic() + _SETTLE_S
    for gateway in gateways:
        with Client(gateway.grpc_address, timeout_s=60.0) as client:
            while set(NAMES) - _models(client):
                if time.monotonic() > until_s:
                    raise SystemExit(f"{gateway.name} does not serve both pools")
                time.sleep(0.1)


def _models(client: Client) -> set[str]:
    return {model.name for model in client.models() if model.max_model_len}
