"""The most that the card can do, measured in a process of its own: a large copy and a large product."""

import statistics
from collections.abc import Callable
from typing import Any

import torch

from bench.rig.children import answer

NUM_RUNS = 12


def main() -> None:
    source = torch.randn(1 << 30, device="cuda")
    target = torch.empty_like(source)
    copy_s = median_s(lambda: target.copy_(source))
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product_s = median_s(lambda: left @ right)
    answer(
        name=f"{torch.cuda.get_device_name()}, torch {torch.__version__}",
        bytes_per_s=2 * source.nbytes / copy_s,
        flops=2 * 8192**3 / product_s,
    )


def median_s(run: Callable[[], Any]) -> float:
    """Of all runs but the first two."""
    times: list[float] = []
    for _ in range(NUM_RUNS):
        begin, end = (torch.Event("cuda", enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times[2:])


if __name__ == "__main__":
    main()
