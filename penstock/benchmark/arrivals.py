"""The times at which requests are sent."""

import argparse
import math
import random
from collections.abc import Iterator

from penstock.benchmark.datasets import positive


def add_arrivals(parser: argparse.ArgumentParser) -> None:
    """The flags that say when requests are sent; their names are vLLM's."""
    group = parser.add_argument_group("load")
    group.add_argument(
        "--request-rate", type=_rate, default=math.inf, metavar="R", help="requests a second; inf: all at once [inf]"
    )
    group.add_argument(
        "--burstiness",
        type=_shape,
        default=1.0,
        metavar="B",
        help="of their times: 1 a Poisson process, below 1 in bursts, above 1 more even, inf a fixed pace [1]",
    )
    group.add_argument("--max-concurrency", type=positive, metavar="N", help="requests at once at most [no bound]")


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> Iterator[float]:
    """Seconds after the beginning at which each of `count` requests is sent.

    Times between two requests follow a gamma distribution of the shape `burstiness` whose mean is 1 / `rate`.
    """
    draw, now_s = random.Random(f"arrivals {seed}"), 0.0
    for _ in range(count):
        yield now_s
        if math.isfinite(rate):
            now_s += 1 / rate if math.isinf(burstiness) else draw.gammavariate(burstiness, 1 / (rate * burstiness))


def _rate(text: str) -> float:
    rate = float(text)
    if not rate > 0:
        raise argparse.ArgumentTypeError(f"give requests a second, above 0, or inf, got {text}")
    return rate


def _shape(text: str) -> float:
    shape = float(text)
    if not shape > 0:
        raise argparse.ArgumentTypeError(f"give a number above 0, or inf, got {text}")
    return shape
