"""Kills and pauses processes of a whole pipeline under load: lost, repeated, changed and leaked must be 0.

Simulated workers, so that every token is known; two of each service; requests of every kind over gRPC and HTTP. Each is
sent once undisturbed and then again and again, while a seeded killer hits processes with kill -9 or stops them for up
to six seconds. The server, one of the kinds, is killed or `cut`: killed, and started again without its last writes. A
client whose connection breaks goes on through another gateway; only those that mean to leave do not. With --rolling,
every process is told to end instead, one after the other, the next when its replacement is ready. The exit status is 1
if any of the four is not 0.

    penstock bench chaos --seed 7 --kills 100 --kinds worker,scheduler --replicas 2
    penstock bench chaos --seed 7 --kills 20 --kinds server --hows killed,cut --every-s 5
    penstock bench chaos --rolling
"""

import argparse
import asyncio
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench.rig.chaos.audit import audit
from bench.rig.chaos.killer import SHARES, Blow, Killer
from bench.rig.chaos.load import Book, Caller, Story, follow, follow_for_ever
from bench.rig.chaos.pipeline import KINDS, SERVER, ServedPipeline
from bench.rig.chaos.recipes import Recipe, make_recipes
from bench.rig.chaos.roller import roll
from bench.rig.chaos.table import Round, render
from bench.rig.chaos.verdict import check_reference, judge

CALM_S = 1.0  # under load before the first blow
_NUM_AT_ONCE = 8  # undisturbed requests
_RESULT_TTL_S = 600.0  # beyond the round: the audit looks for every result


def main() -> int:
    """Runs one round; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="of requests and blows")
    parser.add_argument("--kills", type=int, default=20, help="the round ends after so many restarts")
    parser.add_argument("--seconds", type=float, default=600.0, help="or after so long")
    parser.add_argument("--every-s", type=float, default=2.0, help="mean time between two blows")
    parser.add_argument(
        "--kinds", default=",".join(KINDS), help=f"processes to hit, also {SERVER}; separated by commas"
    )
    parser.add_argument("--hows", default="killed,paused", help=f"what is done to them: {', '.join(SHARES)}")
    parser.add_argument("--rolling", action="store_true", help="a rolling restart in place of blows")
    parser.add_argument("--replicas", type=int, default=2, help="processes of each service")
    parser.add_argument("--clients", type=int, default=12, help="streams at once")
    parser.add_argument("--recipes", type=int, default=48, help="different requests")
    parser.add_argument("--step-ms", type=float, default=10.0, help="device time of a step")
    parser.add_argument("--log", type=Path, help="keeps what the services write, in this file")
    parser.add_argument("flags", nargs="*", help="more flags of penstock serve, behind --")
    options = parser.parse_args()
    if unknown := set(options.kinds.split(",")) - {*KINDS, SERVER} | set(options.hows.split(",")) - SHARES.keys():
        parser.error(f"no such process or blow: {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory(prefix="penstock-chaos-") as folder:
        flags = [f"--step-ms={options.step_ms:g}", "--max-num-batched-tokens=512", "--num-blocks=4096", *options.flags]
        # How soon a supervisor starts a process again is not what is measured.
        flags = ["--max-restart-pause-s=0.5", f"--result-ttl-s={_RESULT_TTL_S + options.seconds:g}", *flags]
        with ServedPipeline(Path(folder) / "run", options.replicas, flags) as pipeline:
            try:
                status = asyncio.run(_round(pipeline, options))
            finally:
                if options.log:
                    shutil.copyfile(Path(folder) / "run" / "err", options.log)
        if left := pipeline.survivors():
            print(f"  leaked: processes {left} outlive the pipeline")
            status = 1
    return status


async def _round(pipeline: ServedPipeline, options: argparse.Namespace) -> int:
    recipes = make_recipes(random.Random(options.seed), options.recipes)
    references = await _undisturbed(pipeline, recipes)
    began_s = time.monotonic()
    stories, blows = await _disturbed(pipeline, recipes, options)
    seconds = time.monotonic() - began_s
    verdict = judge(stories, references, blows)
    leaks, clean_s = await audit(pipeline, _accepted(stories), options.replicas)
    print(render(Round(options.seed, seconds, stories, blows, verdict, leaks, clean_s)), flush=True)
    return int(bool(verdict.num_wrong or leaks))


async def _undisturbed(pipeline: ServedPipeline, recipes: Sequence[Recipe]) -> dict[Recipe, Story]:
    caller = Caller(pipeline.gateways()[:1])
    turns = asyncio.Semaphore(_NUM_AT_ONCE)

    async def one(recipe: Recipe) -> Story:
        async with turns:
            return await follow(recipe, caller)

    stories = await asyncio.gather(*map(one, recipes))
    for story in stories:
        if why := check_reference(story):
            raise SystemExit(f"undisturbed, a {story.recipe.kind} request is wrong already: {why}")
    return dict(zip(recipes, stories, strict=True))


async def _disturbed(
    pipeline: ServedPipeline, recipes: Sequence[Recipe], options: argparse.Namespace
) -> tuple[list[Story], list[Blow]]:
    book = Book()
    gateways = pipeline.gateways()
    clients = [
        asyncio.create_task(follow_for_ever(recipes, gateways, options.seed * 1000 + index, book))
        for index in range(options.clients)
    ]
    await asyncio.sleep(CALM_S)
    blows = await _strike(pipeline, options)
    await asyncio.sleep(CALM_S)
    book.is_closed = True
    await asyncio.gather(*clients)
    return book.stories, blows


async def _strike(pipeline: ServedPipeline, options: argparse.Namespace) -> list[Blow]:
    if options.rolling:
        return await roll(pipeline, options.replicas)
    killer = Killer(
        pipeline,
        kinds=options.kinds.split(","),
        hows=options.hows.split(","),
        replicas=options.replicas,
        every_s=options.every_s,
        seed=options.seed,
    )
    await killer.run(options.kills, options.seconds)
    return killer.blows


def _accepted(stories: Sequence[Story]) -> list[str]:
    return [story.request_id.removeprefix("cmpl-") for story in stories if story.request_id]


if __name__ == "__main__":
    sys.exit(main())
