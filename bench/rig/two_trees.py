"""The decode loop of two checkouts in one run: each round is measured in both, one right after the other."""

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.rig.step_rate import Rate

# Runs in either checkout, so it may use only what both have.
_MEASURE = """
import json, sys
from bench.rig.loop import WINDOW, measure_loop
from bench.rig.step_rate import measure_bus
num_seqs, num_steps, step_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
loop = measure_loop(num_seqs, step_s, num_steps)
rate = measure_bus(step_s, num_seqs, num_steps, WINDOW)
print(json.dumps([loop, rate.steps_per_s, rate.cpu_us]))
"""


@dataclass(frozen=True)
class Turn:
    """The results of one checkout in one round."""

    loop: float  # steps per second of the cores in one process
    pipeline: Rate

    @property
    def ratio(self) -> float:
        """The share of the loop's rate that the pipeline reaches."""
        return self.pipeline.steps_per_s / self.loop


def measure(tree: Path, num_seqs: int, num_steps: int, step_s: float) -> Turn:
    """One turn of a checkout, in processes of its own."""
    command = [sys.executable, "-c", _MEASURE, str(num_seqs), str(num_steps), str(step_s)]
    shown = subprocess.run(command, cwd=tree, stdout=subprocess.PIPE, text=True, check=True).stdout
    loop, steps_per_s, cpu_us = json.loads(shown)
    return Turn(loop, Rate(steps_per_s, cpu_us))


def alternate(
    trees: Sequence[Path], rounds: int, num_seqs: int, num_steps: int, step_s: float, *, say: Callable[[str], None]
) -> list[list[Turn]]:
    """The turns of each checkout, told as they end.

    Who begins changes with each round, so that a machine that drifts favours nobody.
    """
    turns: list[list[Turn]] = [[] for _ in trees]
    for number in range(rounds):
        order = range(len(trees)) if number % 2 == 0 else reversed(range(len(trees)))
        for index in order:
            turn = measure(trees[index], num_seqs, num_steps, step_s)
            turns[index].append(turn)
            say(f"  round {number + 1}, {trees[index].name}: {turn.ratio:.3f}")
    return turns


def line(name: str, turns: Sequence[Turn]) -> str:
    """The medians of one checkout, and the range of its ratios."""
    ratios = [turn.ratio for turn in turns]
    loop = statistics.median(turn.loop for turn in turns)
    pipeline = statistics.median(turn.pipeline.steps_per_s for turn in turns)
    cpu = ", ".join(
        f"{kind} {statistics.median(turn.pipeline.cpu_us[kind] for turn in turns):.0f}"
        for kind in turns[0].pipeline.cpu_us
    )
    return (
        f"{name:14}  {loop:8.1f}  {pipeline:8.1f}  {statistics.median(ratios):5.3f}"
        f"  {min(ratios):5.3f}–{max(ratios):5.3f}  {cpu}"
    )
