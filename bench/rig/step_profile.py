"""The time of decode steps and of prompts: on the device by kernel, and between kernels."""

import random
import time
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch.profiler import ProfilerActivity, profile

from penstock import LLM, SamplingParams

NUM_STEPS = 20
NUM_BEFORE = 16  # steps of every run in which not yet all sequences may decode, so that two runs differ by full batches
PROMPTS = ((1, 128), (32, 128), (8, 2048))  # how many, and how long
NUM_KERNELS = 12
_Kernels: TypeAlias = dict[str, tuple[float, float]]  # microseconds and launches by name


def profile_decode(llm: LLM, batch: int) -> list[str]:
    """Lines that say wall and kernel time of a step in which `batch` sequences decode, and its longest kernels."""
    prompts = [{"prompt_token_ids": [1 + index] * 128} for index in range(batch)]

    def seconds(num_tokens: int) -> float:
        begin = time.perf_counter()
        llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True), use_tqdm=False)
        return time.perf_counter() - begin

    seconds(NUM_BEFORE)  # what is done for the first time is not measured
    wall_us = (seconds(NUM_BEFORE + 4 * NUM_STEPS) - seconds(NUM_BEFORE)) / (4 * NUM_STEPS) * 1e6
    short, long = _kernels(lambda: seconds(NUM_BEFORE)), _kernels(lambda: seconds(NUM_BEFORE + NUM_STEPS))
    per_step: _Kernels = {}
    for name, (time_us, count) in long.items():
        before_us, count_before = short.get(name, (0.0, 0))
        per_step[name] = (time_us - before_us) / NUM_STEPS, (count - count_before) / NUM_STEPS
    return _lines(f"step of {batch}", wall_us, per_step)


def profile_prompts(llm: LLM, count: int, length: int) -> list[str]:
    """Lines that say the same of so many prompts of that length that are computed together, each of which is new."""
    dice = random.Random(1)

    def seconds() -> float:
        prompts = [{"prompt_token_ids": dice.choices(range(1, 200), k=length)} for _ in range(count)]
        begin = time.perf_counter()
        llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
        return time.perf_counter() - begin

    seconds()
    wall_us = min(seconds() for _ in range(3)) * 1e6
    return _lines(f"prompts, {count} of {length:,} tokens", wall_us, _kernels(seconds))


def _lines(what: str, wall_us: float, kernels: _Kernels) -> list[str]:
    total_us, num_launches = (sum(each) for each in zip(*kernels.values(), strict=True))
    lines = [f"{what}: wall {wall_us:.0f} us, kernels {total_us:.0f} us in {num_launches:.0f}"]
    longest = sorted(((*each, name) for name, each in kernels.items()), reverse=True)[:NUM_KERNELS]
    return lines + [f"    {time_us:8.1f} us {count:6.1f} x {name[:80]}" for time_us, count, name in longest]


def _kernels(run: Callable[[], object]) -> _Kernels:
    """The time and launches of each kernel."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        run()
        torch.cuda.synchronize()
    return {
        each.key: (each.self_device_time_total, each.count)
        for each in found.key_averages()
        if each.device_type.name == "CUDA"
    }
