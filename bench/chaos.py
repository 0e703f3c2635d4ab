"""Kills and pauses processes of a whole pipeline under load: lost, repeated, changed and leaked must be 0.

Simulated workers, so that every token is known; two of each service; requests of every kind over gRPC and HTTP. Each is
sent once undisturbed and then again and again, while a seeded killer hits processes with kill -9 or stops them for up
to six seconds. Others are told to end, `slow` when they are started again, `silent`: their connections to the server
are half-open, or `bombed` by foreign connections. The server, one of the kinds, is killed, `cut`: killed, and started
again without its last writes, or `readonly` for a while. The kind `upgrade` is workers of a second model that serve
beside the others: every answer is wholly of one model. With --max-streams, clients are refused and ask again. A
client whose connection breaks goes on through another gateway; only those that mean to leave do not. With --rolling,
every process is told to end instead, one after the other, the next when its replacement is ready; with --from, the
pipeline is of an earlier revision's code, and is upgraded by that and then rolled back. With --pools 2 there are two
pipelines, each with a server, whose gateways serve both; at the end one server is away for a while. The exit status is
1 if any of the four is not 0, or a foreign connection was told something else than what is wrong with it.

    penstock bench chaos --seed 7 --kills 100 --kinds worker,scheduler --replicas 2
    penstock bench chaos --seed 7 --kills 20 --kinds server --hows killed,cut --every-s 5
    penstock bench chaos --hows killed,slow,silent,readonly,bombed --kinds gateway,worker,upgrade,server --max-streams 4
    penstock bench chaos --pools 2 --kinds gateway,tokenizer,scheduler,worker,detokenizer,server --kills 60
    penstock bench chaos --chats harmony
    penstock bench chaos --rolling
    penstock bench chaos --rolling --from v0.1.0
"""

import argparse
import asyncio
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from bench.rig.chaos.audit import audit
from bench.rig.chaos.bombs import Replies
from bench.rig.chaos.killer import SHARES, Blow, Killer
from bench.rig.chaos.load import Book, Caller, follow_for_ever
from bench.rig.chaos.pipeline import KINDS, ROOT, SERVER, TEMPLATES, ServedPipeline
from bench.rig.chaos.recipes import Recipe, make_recipes
from bench.rig.chaos.reference import undisturbed
from bench.rig.chaos.revisions import Revisions
from bench.rig.chaos.roller import roll
from bench.rig.chaos.stories import Story
from bench.rig.chaos.table import Round, render
from bench.rig.chaos.two_pools import run as run_two_pools
from bench.rig.chaos.verdict import Model, judge
from bench.rig.chaos.workers import SECOND_SEED, UPGRADE, Workers
from contract.domain.request import parse_request_id

if TYPE_CHECKING:
    from bench.rig.chaos.collector import Collector

CALM_S = 1.0  # under load before the first blow
_BODY_TIMEOUT_S = 10.0  # as long as for a head: halves of both are sent
_RESULT_TTL_S = 600.0  # beyond the round: the audit looks for every result


def main() -> int:
    """Runs one round; the exit status."""
    options = _arguments()
    kinds, hows = set(options.kinds.split(",")), set(options.hows.split(","))
    with tempfile.TemporaryDirectory(prefix="penstock-chaos-") as folder, ExitStack() as stack:
        flags = [f"--step-ms={options.step_ms:g}", "--max-num-batched-tokens=512", "--num-blocks=4096"]
        flags += [f"--max-streams={options.max_streams}", f"--body-timeout-s={_BODY_TIMEOUT_S:g}", *options.flags]
        # How soon a supervisor starts a process again is not what is measured.
        flags = ["--max-restart-pause-s=0.5", f"--result-ttl-s={_RESULT_TTL_S + options.seconds:g}", *flags]
        collector = None
        if options.traces:
            from bench.rig.chaos.collector import Collector  # noqa: PLC0415  (its packages are an extra's)

            collector = stack.enter_context(Collector())
            flags.append(f"--otlp-traces-endpoint={collector.endpoint}")
        # An earlier revision knows no such replies.
        without = ("told", "tools", "typed", "responses", "messages", "beams") if options.revision else ()
        recipes = make_recipes(random.Random(options.seed), options.recipes, without)
        if options.pools == 2:
            return run_two_pools(Path(folder), recipes, flags, options)
        others = [_second_model(Path(folder) / "second", recipes, flags, options.chats)] if UPGRADE in kinds else []
        revisions = None
        if options.revision:
            revisions = Revisions(ROOT, options.revision, Path(folder))
        with ServedPipeline(
            Path(folder) / "run",
            options.replicas,
            flags,
            has_proxy="silent" in hows and not options.rolling,
            code=revisions.path if revisions else None,
            chats=options.chats,
        ) as pipeline:
            try:
                status = asyncio.run(
                    _round(pipeline, recipes, options, others, revisions=revisions, collector=collector)
                )
            finally:
                if options.log:
                    shutil.copyfile(Path(folder) / "run" / "err", options.log)
        if left := pipeline.survivors():
            print(f"  leaked: processes {left} outlive the pipeline")
            status = 1
    return status


def _arguments() -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="of requests and blows")
    parser.add_argument("--kills", type=int, default=20, help="the round ends after so many restarts")
    parser.add_argument("--seconds", type=float, default=600.0, help="or after so long")
    parser.add_argument("--every-s", type=float, default=2.0, help="mean time between two blows")
    parser.add_argument(
        "--kinds", default=",".join(KINDS), help=f"processes to hit, also {SERVER} and {UPGRADE}; separated by commas"
    )
    parser.add_argument("--hows", default="killed,paused", help=f"what is done to them: {', '.join(SHARES)}")
    parser.add_argument("--rolling", action="store_true", help="a rolling restart in place of blows")
    parser.add_argument("--from", dest="revision", help="revision of the pipeline that is upgraded by --rolling")
    parser.add_argument("--traces", action="store_true", help="a collector must be told of every request (needs otel)")
    parser.add_argument("--replicas", type=int, default=2, help="processes of each service")
    parser.add_argument("--pools", type=int, choices=(1, 2), default=1, help="pools behind the gateways")
    parser.add_argument(
        "--chats", choices=sorted(TEMPLATES), default="hermes", help="family whose chat template the model has"
    )
    parser.add_argument("--max-streams", type=int, default=0, help="of a gateway: it refuses more; 0: no bound")
    parser.add_argument("--clients", type=int, default=12, help="streams at once")
    parser.add_argument("--recipes", type=int, default=48, help="different requests")
    parser.add_argument("--step-ms", type=float, default=10.0, help="device time of a step")
    parser.add_argument("--log", type=Path, help="keeps what the services write, in this file")
    parser.add_argument("flags", nargs="*", help="more flags of penstock serve, after --")
    options = parser.parse_args()
    kinds, hows = set(options.kinds.split(",")), set(options.hows.split(","))
    if unknown := kinds - {*KINDS, SERVER, UPGRADE} | hows - SHARES.keys():
        parser.error(f"no such process or blow: {', '.join(sorted(unknown))}")
    if options.revision and not options.rolling:
        parser.error("--from is for --rolling")
    if options.revision and options.traces:
        parser.error("--traces is not for --from: not every revision has traces")
    if options.pools == 2 and (options.rolling or options.traces or UPGRADE in kinds or "bombed" in hows):
        parser.error(f"--pools 2 has neither --rolling nor --traces nor {UPGRADE} nor bombed")
    return options


def _second_model(directory: Path, recipes: Sequence[Recipe], flags: Sequence[str], chats: str) -> Model:
    """The answers of the second model, undisturbed and alone."""
    with ServedPipeline(directory, 1, [*flags, f"--simulated-seed={SECOND_SEED}"], chats=chats) as pipeline:
        return asyncio.run(undisturbed(Caller(pipeline.gateways()[:1]), recipes, SECOND_SEED))


async def _round(
    pipeline: ServedPipeline,
    recipes: Sequence[Recipe],
    options: argparse.Namespace,
    others: Sequence[Model],
    *,
    revisions: Revisions | None,
    collector: "Collector | None",
) -> int:
    models = [await undisturbed(Caller(pipeline.gateways()[:1]), recipes), *others]
    upgrade = None
    with pipeline.log_path.open("a") as log:
        if others:
            upgrade = Workers(pipeline.serve_flags, pipeline.redis_url, options.replicas, log, seed=SECOND_SEED)
            await upgrade.start()
        try:
            began_s = time.monotonic()
            stories, blows, replies = await _disturbed(pipeline, recipes, options, revisions)
            seconds = time.monotonic() - began_s
        finally:
            if upgrade:
                await upgrade.stop()
    verdict = judge(stories, models, blows)
    leaks, clean_s = await audit(pipeline, _accepted(stories), options.replicas, collector)
    print(render(Round(options.seed, seconds, stories, blows, verdict, leaks, clean_s, replies)), flush=True)
    return int(bool(verdict.num_wrong or leaks or replies.wrong))


async def _disturbed(
    pipeline: ServedPipeline, recipes: Sequence[Recipe], options: argparse.Namespace, revisions: Revisions | None
) -> tuple[list[Story], list[Blow], Replies]:
    book = Book()
    gateways = pipeline.gateways()
    clients = [
        asyncio.create_task(follow_for_ever(recipes, gateways, options.seed * 1000 + index, book))
        for index in range(options.clients)
    ]
    await asyncio.sleep(CALM_S)
    blows, replies = await _strike(pipeline, options, revisions)
    await asyncio.sleep(CALM_S)
    book.is_closed = True
    await asyncio.gather(*clients)
    return book.stories, blows, replies


async def _strike(
    pipeline: ServedPipeline, options: argparse.Namespace, revisions: Revisions | None
) -> tuple[list[Blow], Replies]:
    if revisions:
        revisions.choose_present()
        blows = await roll(pipeline, options.replicas, "upgraded")
        revisions.choose_earlier()
        return blows + await roll(pipeline, options.replicas, "rolled back"), Replies()
    if options.rolling:
        return await roll(pipeline, options.replicas), Replies()
    killer = Killer(
        pipeline,
        kinds=options.kinds.split(","),
        hows=options.hows.split(","),
        replicas=options.replicas,
        every_s=options.every_s,
        seed=options.seed,
    )
    await killer.run(options.kills, options.seconds)
    return killer.blows, killer.replies


def _accepted(stories: Sequence[Story]) -> list[str]:
    return [parse_request_id(story.request_id).hex() for story in stories if story.request_id]


if __name__ == "__main__":
    sys.exit(main())
