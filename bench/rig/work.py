"""The work that `bench.gpu` gives engines, and the least time that a card needs for it."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tokenizers import Tokenizer

from bench.rig.shapes import Shape

AT_ONCE = 256  # requests of the served rows
NUM_SERVED = 2000
NUM_ALONE = 30
_PROMPTS = {
    "prefill": (32, 2048),
    "embed": (32, 2048),
    "long": (8, 16_000),
    "contexts": (64, 8000),
}  # of rows that are prompts: how many, tokens
_AFTER = {"deep": "contexts"}  # rows of tokens after the prompts of another
RATE_PER_S, RATE_S = 16.0, 40.0  # requests of the row `rate`, and for how long they come
RATE_INPUTS, RATE_OUTPUTS = (410, 1638), (102, 410)  # tokens, as `vllm bench serve` draws them around 1,024 and 256


@dataclass(frozen=True)
class Work:
    """One row of the table: requests, and how they come."""

    name: str
    prompts: list[list[int]]
    num_tokens: list[int]  # output of each
    temperature: float = 0.0
    at_once: int = 0  # requests at once, the next one when one ends; 0: all
    counts_prompts: bool = False  # tokens per second are prompt tokens
    texts: list[str] | None = None  # the prompts as text: then engines get these
    arrivals_s: list[float] | None = None  # when each comes, after the first could; None: `at_once` says
    num_rounds: int = 1  # how often every engine does it: the fastest counts
    pools: bool = False  # vectors of the prompts are asked for, and nothing is generated
    after: str | None = None  # the row with the same prompts and one token each, whose time is not part of this one's

    @property
    def inputs(self) -> list[Any]:
        """The form of the prompts: token ids or texts."""
        return self.texts or self.prompts

    @property
    def counted_tokens(self) -> int:
        """The tokens of which a rate is made."""
        if self.counts_prompts:
            return sum(map(len, self.prompts))
        return sum(self.num_tokens) - (len(self.prompts) if self.after else 0)

    def seconds(self, rounds: Mapping[str, Sequence[float]]) -> float | None:
        """The least that it took, by the rounds of each row; None: not measured."""
        found = [rounds.get(row) for row in (self.name, self.after) if row is not None]
        if not all(found):
            return None
        own, *before = (min(each) for each in found if each)
        return own - sum(before)

    def as_json(self) -> dict[str, Any]:
        """For another process."""
        return asdict(self)


def make_work(row: str, num_rounds: int = 1) -> Work:
    """The work of a row: the same at every call. The long ones, `nano`, `served` and `rate`, are done once."""
    draw = random.Random(0)

    def prompts(count: int, length: int) -> list[list[int]]:
        return [[draw.randint(0, 10000) for _ in range(length)] for _ in range(count)]

    if row in _PROMPTS or row in _AFTER:
        after = _AFTER.get(row)
        count, length = _PROMPTS[after or row]
        return Work(
            row,
            prompts(count, length),
            [512 if after else 1] * count,
            counts_prompts=after is None,
            num_rounds=num_rounds,
            pools=row == "embed",
            after=after,
        )
    if row == "nano":
        mixed = [prompts(1, draw.randint(100, 1024))[0] for _ in range(256)]
        return Work(row, mixed, [draw.randint(100, 1024) for _ in range(256)], temperature=0.6)
    if row == "served":
        return Work(row, prompts(NUM_SERVED, 512), [128] * NUM_SERVED, at_once=AT_ONCE)
    if row == "alone":
        return Work(row, prompts(NUM_ALONE, 128), [128] * NUM_ALONE, at_once=1, num_rounds=num_rounds)
    if row == "rate":
        arrivals_s, lengths, outputs = draw_rate(draw, RATE_PER_S)
        return Work(row, [prompts(1, length)[0] for length in lengths], outputs, arrivals_s=arrivals_s)
    batch = int(row.removeprefix("decode"))
    return Work(row, prompts(batch, 128), [256] * batch, num_rounds=num_rounds)


def draw_rate(draw: random.Random, per_s: float) -> tuple[list[float], list[int], list[int]]:
    """The requests of the row `rate`: when each comes, its tokens, and those of its output."""
    arrivals_s, now_s = list[float](), 0.0
    while (now_s := now_s + draw.expovariate(per_s)) < RATE_S:
        arrivals_s.append(now_s)
    lengths = [draw.randint(*RATE_INPUTS) for _ in arrivals_s]
    return arrivals_s, lengths, [draw.randint(*RATE_OUTPUTS) for _ in arrivals_s]


def as_text(work: Work, tokenizer: Tokenizer) -> Work:
    """The same with texts for prompts, as long as they were up to a few tokens: random ids need not come back."""
    lengths = [len(prompt) for prompt in work.prompts]
    found = tokenizer.encode_batch(tokenizer.decode_batch(work.prompts), add_special_tokens=False)
    prompts = [each.ids[:length] for each, length in zip(found, lengths, strict=True)]
    return replace(work, prompts=prompts, texts=tokenizer.decode_batch(prompts))


@dataclass(frozen=True)
class Ceilings:
    """The most that a card can do."""

    name: str
    bytes_per_s: float  # copied, bytes read and written
    flops: float  # bf16 product of 8192 x 8192 matrices


def floor_s(shape: Shape, work: Work, ceilings: Ceilings) -> float:
    """Seconds for the products of all prompts, and for the products or the bytes of each decode step, whichever takes
    longer: weights and KV read once a step, nothing overlapped; of experts those that as many tokens are expected to
    choose. Products count in bf16, also of weights in 8 bits. Requests that wait for others come in waves. Prompts of a
    row that comes after another are that one's.
    """
    layer_flops = 2 * shape.token_parameters
    seconds = 0.0 if work.after else sum(map(len, work.prompts)) * layer_flops / ceilings.flops
    wave = work.at_once or len(work.prompts)
    for first in range(0, len(work.prompts), wave):
        lengths = list(
            zip(map(len, work.prompts[first : first + wave]), work.num_tokens[first : first + wave], strict=True)
        )
        for step in range(1, max(num_tokens for _, num_tokens in lengths)):
            contexts = [prompt + step for prompt, num_tokens in lengths if num_tokens > step]
            num_bytes = shape.weight_bytes(len(contexts)) + sum(map(shape.kv_bytes, contexts))
            flops = (layer_flops + 2 * shape.head_parameters) * len(contexts)
            seconds += max(num_bytes / ceilings.bytes_per_s, flops / ceilings.flops)
    return seconds
