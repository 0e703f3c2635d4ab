"""Kills workers of a real model under load, and audits what every stream got.

In half precision logits move with the batch, so a stream that goes on elsewhere need not go on as it would have. What
is promised is that no delivered token changes, and that each further one is a token that the model might as well have
chosen. So clients generate greedily while workers are killed with kill -9, each while another is up. Then every stream
is asked for again from its start, which must bring the tokens that its client got, and transformers says in fp32, to
the whole sequence at once, by how much each token misses the likeliest. The exit status is 1 if a stream was lost or
changed, or a token after a death is further off than `--max-gap`.

    penstock bench continuation --device cuda --workers 3 --kills 4
    penstock bench continuation --device cpu --workers 2 --kills 2 --clients 4 --tokens 100
"""

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from grpc import aio
from tokenizers import Tokenizer

from bench.rig.chaos.pipeline import ServedPipeline
from bench.rig.machine import describe_machine
from bench.rig.prose import prose
from bench.rig.teacher import F32, gaps
from contract.domain.errors import PenstockError
from contract.domain.params import SamplingParams
from contract.v1 import inference_pb2, inference_pb2_grpc
from penstock.client import Accepted, AsyncClient, Delta
from penstock.client.wire import CHANNEL_OPTIONS
from penstock.launcher.layout import BUNDLED_MODEL

# What rounding to bf16 does to these models where nothing dies; see tests/parity/test_gpu_parity.py.
MAX_GAP = 0.75
MAX_PROMPT = 300  # tokens
_SILENCE_S = 90.0  # without an event: the stream is lost


@dataclass
class Story:
    """One stream as its client saw it."""

    prompt: list[int]
    request_id: str = ""
    token_ids: list[int] = field(default_factory=list)
    deaths: list[int] = field(default_factory=list)  # how many tokens it had when workers died
    error: str = ""
    has_ended: bool = False
    retold: list[int] = field(default_factory=list)  # what it is when it is asked for again from its start


class Load:
    """Clients that generate one answer after the other until they are told to stop."""

    def __init__(self, address: str, prompts: Sequence[list[int]], num_tokens: int) -> None:
        self.stories: list[Story] = []
        self.is_closed = False
        self._address = address
        self._prompts = prompts
        self._params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)

    async def run(self, num_clients: int) -> None:
        """Until it is closed and all have ended."""
        async with AsyncClient(self._address) as client:
            await asyncio.gather(*(self._generate(client) for _ in range(num_clients)))

    def note_death(self) -> int:
        """A worker dies now; in how many streams."""
        running = [story for story in self.stories if story.token_ids and not story.has_ended]
        for story in running:
            story.deaths.append(len(story.token_ids))
        return len(running)

    async def _generate(self, client: AsyncClient) -> None:
        while not self.is_closed:
            story = Story(self._prompts[len(self.stories) % len(self._prompts)])
            self.stories.append(story)
            try:
                await self._follow(client, story)
            except (PenstockError, TimeoutError) as error:
                story.error = f"{type(error).__name__}: {error}"
            story.has_ended = True

    async def _follow(self, client: AsyncClient, story: Story) -> None:
        async with aclosing(client.generate(story.prompt, self._params, resumable=True)) as events:
            while True:
                try:
                    event = await asyncio.wait_for(anext(events), _SILENCE_S)
                except StopAsyncIteration:
                    return
                if isinstance(event, Accepted):
                    story.request_id = event.request_id
                    continue
                assert isinstance(event, Delta)
                if event.token_offset != len(story.token_ids):
                    story.error = f"at token {len(story.token_ids)} came those from {event.token_offset} on"
                story.token_ids += event.token_ids


async def kill_workers(
    pipeline: ServedPipeline, load: Load, options: argparse.Namespace, rng: random.Random
) -> list[int]:
    """Kills one after the other, each while another one is ready; how many streams ran at each death."""
    end_s = time.monotonic() + options.seconds
    gone: set[int] = set()
    running: list[int] = []
    while len(gone) < options.kills and time.monotonic() < end_s:
        await asyncio.sleep(options.every_s * rng.uniform(0.5, 1.5))
        pids = pipeline.pids()
        up = [pids[name] for name in sorted(pipeline.ready()) if name.startswith("worker") and pids[name] not in gone]
        if len(up) > 1:
            pid = rng.choice(up)
            gone.add(pid)
            running.append(load.note_death())
            os.kill(pid, signal.SIGKILL)
    await asyncio.sleep(options.every_s)
    return running


async def retell(address: str, stories: Sequence[Story]) -> None:
    """Asks for every stream again, from its start."""
    async with aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)

        async def one(story: Story) -> None:
            async for event in stub.Resume(inference_pb2.ResumeCall(request_id=story.request_id)):
                story.retold += np.frombuffer(event.delta.token_ids, "<u4").tolist()

        await asyncio.gather(*map(one, stories))


def make_prompts(model: Path, rng: random.Random, count: int) -> list[list[int]]:
    """Token ids: every other prompt is English, the others are drawn, so that few tokens are certain."""
    vocab_size = json.loads((model / "config.json").read_text("utf-8"))["vocab_size"]
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    text = prose()
    prompts = []
    for index in range(count):
        length = rng.randint(1, MAX_PROMPT)
        if index % 2:
            prompts.append([rng.randrange(3, vocab_size) for _ in range(length)])
        else:
            start = rng.randrange(len(text) // 2)
            prompts.append(tokenizer.encode(text[start : start + 8 * MAX_PROMPT]).ids[:length])
    return prompts


def report(stories: Sequence[Story], found: Sequence[F32], max_gap: float) -> bool:
    """Prints what the audit has found; whether all is well."""
    nothing = np.zeros(0, np.float32)
    parts = {
        "streams of which no worker died": [gap for story, gap in zip(stories, found, strict=True) if not story.deaths],
        "others, before the first death": [
            gap[: story.deaths[0]] for story, gap in zip(stories, found, strict=True) if story.deaths
        ],
        "others, after it": [gap[story.deaths[0] :] for story, gap in zip(stories, found, strict=True) if story.deaths],
    }
    print("\n                                 streams   tokens  not the likeliest  largest gap")
    for name, of_streams in parts.items():
        gap = np.concatenate([nothing, *of_streams])
        share, largest = (float((gap > 0).mean()), float(gap.max())) if len(gap) else (0.0, 0.0)
        print(f"{name:32} {len(of_streams):7}  {len(gap):7}  {share:17.2%}  {largest:11.3f}")
    num_lost = sum(bool(story.error) for story in stories)
    num_changed = sum(not story.error and story.retold != story.token_ids for story in stories)
    later = np.concatenate([nothing, *parts["others, after it"]])
    num_off = int((later > max_gap).sum())
    print(f"\nlost {num_lost}, changed {num_changed}, after a death and off by more than {max_gap:g}: {num_off} tokens")
    for story in [story for story in stories if story.error][:10]:
        print(f"  {story.request_id}: {story.error}")
    return not (num_lost or num_changed or num_off)


async def disturb(pipeline: ServedPipeline, options: argparse.Namespace) -> list[Story]:
    """The streams of a load during which workers died."""
    rng = random.Random(options.seed)
    address = pipeline.gateways()[0].grpc_address
    load = Load(address, make_prompts(options.model, rng, 4 * options.clients), options.tokens)
    clients = asyncio.create_task(load.run(options.clients))
    running = await kill_workers(pipeline, load, options, rng)
    load.is_closed = True
    await clients
    print(f"\n{len(running)} workers killed, while {', '.join(map(str, running))} streams ran", flush=True)
    await retell(address, [story for story in load.stories if not story.error])
    return load.stories


def main() -> int:
    """One round; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=BUNDLED_MODEL, help="directory of a checkpoint")
    parser.add_argument("--dtype", default="bfloat16", help="of weights and KV cache")
    parser.add_argument("--device", default="auto", help="what computes: auto, cpu or cuda")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=300.0, help="no further worker is killed after so long")
    parser.add_argument("--every-s", type=float, default=2.0, help="mean time between deaths, beside that to start")
    parser.add_argument("--clients", type=int, default=16, help="streams at once")
    parser.add_argument("--tokens", type=int, default=400, help="of each")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--max-gap", type=float, default=MAX_GAP, help="in log-probability")
    parser.add_argument("--log", type=Path, help="keeps what the services write, in this file")
    parser.add_argument("flags", nargs="*", help="more flags of penstock serve, after --")
    options = parser.parse_args()
    print(describe_machine(), flush=True)
    flags = [
        *(f"--workers={options.workers}", f"--dtype={options.dtype}", f"--device={options.device}"),
        *("--num-blocks=4096", "--max-num-seqs=64", "--max-restart-pause-s=0.5", *options.flags),
    ]
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="penstock-continuation-") as folder:
        try:
            with ServedPipeline(Path(folder) / "run", 1, flags, options.model) as pipeline:
                print(f"ready after {time.monotonic() - began_s:.0f} s", flush=True)
                stories = asyncio.run(disturb(pipeline, options))
        finally:
            if options.log:
                options.log.write_bytes((Path(folder) / "run" / "err").read_bytes())
    answers = [(story.prompt, story.token_ids) for story in stories]
    is_well = report(stories, gaps(options.model, options.dtype, answers), options.max_gap)
    print(f"{time.monotonic() - began_s:.0f} s in all")
    return int(not is_well)


if __name__ == "__main__":
    sys.exit(main())
