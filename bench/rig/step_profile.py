"""The time of decode steps: on the device by kernel, and between steps."""

import time
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from penstock import LLM, SamplingParams

NUM_STEPS = 20
NUM_BEFORE = 16  # steps of every run in which not yet all sequences may decode, so that two runs differ by full batches
NUM_KERNELS = 8


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
    per_step = []  # microseconds, launches, kernel
    for name, (time_us, count) in long.items():
        before_us, count_before = short.get(name, (0.0, 0))
        per_step.append(((time_us - before_us) / NUM_STEPS, (count - count_before) / NUM_STEPS, name))
    total_us, num_launches = sum(each[0] for each in per_step), sum(each[1] for each in per_step)
    lines = [f"step of {batch}: wall {wall_us:.0f} us, kernels {total_us:.0f} us in {num_launches:.0f}"]
    longest = sorted(per_step, reverse=True)[:NUM_KERNELS]
    return lines + [f"    {time_us:8.1f} us {count:6.1f} x {name[:80]}" for time_us, count, name in longest]


def _kernels(run: Callable[[], object]) -> dict[str, tuple[float, int]]:
    """Microseconds and launches of each kernel."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        run()
        torch.cuda.synchronize()
    return {
        each.key: (each.self_device_time_total, each.count)
        for each in found.key_averages()
        if each.device_type.name == "CUDA"
    }
