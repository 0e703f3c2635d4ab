"""Where the time of decode steps goes: on the device by kernel, and between steps."""

import time
from collections import Counter

import torch
from torch.profiler import ProfilerActivity, profile

from penstock import LLM, SamplingParams

NUM_STEPS = 20
NUM_KERNELS = 8


def profile_decode(llm: LLM, batch: int) -> list[str]:
    """Lines that say wall and kernel time of a step in which `batch` sequences decode, and its longest kernels."""
    prompts = [{"prompt_token_ids": [1 + index] * 128} for index in range(batch)]

    def seconds(num_tokens: int) -> float:
        begin = time.perf_counter()
        llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True), use_tqdm=False)
        return time.perf_counter() - begin

    wall_us = (seconds(4 + 4 * NUM_STEPS) - seconds(4)) / (4 * NUM_STEPS) * 1e6
    short, long = _kernels(lambda: seconds(4)), _kernels(lambda: seconds(4 + NUM_STEPS))
    times, counts = Counter[str](), Counter[str]()
    for name, (time_us, count) in long.items():
        before = short.get(name, (0.0, 0))
        times[name], counts[name] = (time_us - before[0]) / NUM_STEPS, round((count - before[1]) / NUM_STEPS, 1)
    total = sum(times.values())
    lines = [f"step of {batch}: wall {wall_us:.0f} us, kernels {total:.0f} us in {sum(counts.values()):.0f}"]
    return lines + [
        f"    {time_us:8.1f} us {counts[name]:6.1f} x {name[:80]}" for name, time_us in times.most_common(NUM_KERNELS)
    ]


def _kernels(run) -> dict[str, tuple[float, int]]:  # type: ignore[no-untyped-def]
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        run()
        torch.cuda.synchronize()
    return {
        each.key: (each.self_device_time_total, each.count)
        for each in found.key_averages()
        if each.device_type == torch.autograd.DeviceType.CUDA
    }
