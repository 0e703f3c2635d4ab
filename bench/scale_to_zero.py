"""A pool without workers: what waits is told, and served when one comes; running streams survive the last one's end.

First requests come to a pool whose workers are all away. The query by which KEDA starts a worker (max of
penstock_waiting_requests, asked of a real Prometheus if one is installed) must say so within 15 s; then a worker comes,
and all must finish. Then, while streams run, the last worker is told to end, and none comes for a while: no stream may
end or err meanwhile; after a worker came each must be as undisturbed. The exit status is 1 if not.

    penstock bench scale-to-zero --streams 50 --away-s 120
"""

import argparse
import asyncio
import random
import shutil
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from bench.rig.chaos.load import Caller, follow
from bench.rig.chaos.pipeline import EOS, ServedPipeline
from bench.rig.chaos.recipes import Recipe
from bench.rig.chaos.stories import End, Story
from bench.rig.chaos.verdict import Model, check_reference, judge
from bench.rig.chaos.workers import Workers
from bench.rig.machine import describe_machine
from bench.rig.prometheus import Prometheus, is_installed
from contract.domain.params import SamplingParams
from penstock.launcher.ports import free_ports

METRIC = "penstock_waiting_requests"
TOLD_WITHIN_S = 15.0
_SCRAPE_S = 2
_LOOK_S = 0.1
_START_S = 180.0  # for what takes long on a busy machine
_QUERY = f"max({METRIC})"


def main() -> int:
    """Runs both parts; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=50, help="requests at once")
    parser.add_argument("--away-s", type=float, default=120.0, help="for which no worker is there")
    parser.add_argument("--tokens", type=int, default=400, help="of each stream")
    parser.add_argument("--step-ms", type=float, default=10.0, help="device time of a step")
    parser.add_argument("--seed", type=int, default=1, help="of the requests")
    parser.add_argument("--log", type=Path, help="keeps what the services write, in this file")
    options = parser.parse_args()
    print(describe_machine(), flush=True)
    with tempfile.TemporaryDirectory(prefix="penstock-zero-") as folder, ExitStack() as stack:
        flags = [f"--step-ms={options.step_ms:g}", "--num-blocks=8192", f"--max-num-seqs={options.streams}"]
        port = free_ports(1)[0]
        pipeline = stack.enter_context(
            ServedPipeline(Path(folder) / "run", 1, ["--workers=0", f"--metrics-port={port}", *flags])
        )
        ask = _prometheus(Path(folder), port, stack) or (lambda: _read_page(port))
        try:
            return asyncio.run(_run(pipeline, options, ask))
        finally:
            if options.log:
                shutil.copyfile(Path(folder) / "run" / "err", options.log)


async def _run(pipeline: ServedPipeline, options: argparse.Namespace, ask: Callable[[], float]) -> int:
    rng = random.Random(options.seed)
    recipes = [_recipe(rng, options.tokens, index % 2 == 0) for index in range(options.streams)]
    with pipeline.log_path.open("a") as log:
        workers = [
            Workers(pipeline.serve_flags, pipeline.redis_url, 1, log, name=name, seed=0) for name in ("first", "second")
        ]
        waiting, told_s = await _from_zero(pipeline, recipes, workers[0], ask)
        # The same requests, served by a worker that stayed: what they are without anything happening.
        references = dict(zip(recipes, waiting, strict=True))
        wrong = [why for story in waiting if (why := check_reference(story))]
        print(f"{len(waiting)} requests waited; the query said so after {told_s:.1f} s; {len(wrong)} ended wrongly")
        stories, longest_s = await _to_zero(pipeline, recipes, workers, options.away_s)
        await workers[1].stop()
    verdict = judge(stories, [Model(0, references)], [])
    print(
        f"{len(stories)} streams ran when the last worker went for {options.away_s:g} s; the longest silence was "
        f"{longest_s:.1f} s; lost {len(verdict.lost)}  repeated {len(verdict.repeated)}  changed {len(verdict.changed)}"
    )
    for line in (*wrong, *verdict.lost, *verdict.repeated, *verdict.changed):
        print(f"  {line}")
    return int(bool(wrong or verdict.num_wrong or told_s > TOLD_WITHIN_S))


async def _from_zero(
    pipeline: ServedPipeline, recipes: Sequence[Recipe], worker: Workers, ask: Callable[[], float]
) -> tuple[list[Story], float]:
    """Sends everything to a pool without workers, and starts one when the query says that it is wanted."""
    began_s = time.monotonic()
    tasks = [asyncio.create_task(_follow(pipeline, recipe)) for recipe in recipes]
    while await asyncio.to_thread(ask) < len(recipes):
        if time.monotonic() - began_s > _START_S:
            raise SystemExit(f"{_QUERY} never said that {len(recipes)} requests wait")
        await asyncio.sleep(_LOOK_S)
    told_s = time.monotonic() - began_s
    await worker.start()
    return await asyncio.gather(*tasks), told_s


async def _to_zero(
    pipeline: ServedPipeline, recipes: Sequence[Recipe], workers: Sequence[Workers], away_s: float
) -> tuple[list[Story], float]:
    """Ends the worker while all streams run, and starts another one later."""
    running: list[Story] = []
    tasks = [asyncio.create_task(_follow(pipeline, recipe, away_s, running.append)) for recipe in recipes]
    while len(running) < len(recipes) or not all(_has_text(story) for story in running):
        if any(task.done() for task in tasks):
            raise SystemExit("a stream ended before all ran: ask for more --tokens")
        await asyncio.sleep(_LOOK_S)
    await workers[0].stop()
    left = [task for task in tasks if not task.done()]
    await asyncio.sleep(away_s)
    if ended := [task.result() for task in left if task.done()]:
        print(f"  {len(ended)} streams ended without a worker: {ended[0].end.value} {ended[0].error}")
    await workers[1].start()
    stories = await asyncio.gather(*tasks)
    times_s = [zip(story.event_times_s, story.event_times_s[1:], strict=False) for story in stories]
    return stories, max(after - before for pairs in times_s for before, after in pairs)


async def _follow(
    pipeline: ServedPipeline, recipe: Recipe, away_s: float = 0.0, begun: Callable[[Story], None] | None = None
) -> Story:
    return await follow(recipe, Caller(pipeline.gateways()), silence_s=away_s + _START_S, begun=begun)


def _has_text(story: Story) -> bool:
    return story.end is End.SILENT and bool(story.samples[0].text)


def _recipe(rng: random.Random, num_tokens: int, is_http: bool) -> Recipe:
    prompt_ids = tuple(rng.randrange(EOS) for _ in range(rng.randint(1, 60)))
    params = SamplingParams(temperature=1.0, seed=rng.randrange(2**31), max_tokens=num_tokens, ignore_eos=True)
    return Recipe("seeded", is_http, prompt_ids, params)


def _prometheus(folder: Path, metrics_port: int, stack: ExitStack) -> Callable[[], float] | None:
    """Asks a Prometheus that scrapes the pipeline as one in a cluster does; None: there is none on this machine."""
    if not is_installed():
        print("prometheus is not installed: the page of metrics is read instead")
        return None
    server = stack.enter_context(Prometheus(folder / "prometheus", metrics_port, scrape_s=_SCRAPE_S))

    def ask() -> float:
        found = server.values(_QUERY)
        return found[0] if found else 0.0

    return ask


def _read_page(metrics_port: int) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/metrics", timeout=10.0) as reply:
        lines = reply.read().decode().splitlines()
    values = [float(line.rpartition(" ")[2]) for line in lines if line.startswith((METRIC + " ", METRIC + "{"))]
    return max(values, default=0.0)


if __name__ == "__main__":
    sys.exit(main())
