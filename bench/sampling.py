"""The time of a decode step of the worker by what its requests ask of the sampler.

    penstock bench sampling [--model 0.6b] [--batches 1,32,256]

Shapes of a published model, random weights. The runner carries out plans as a scheduler sends them, two on their way
at a time, and what each brings is taken, in one process with nothing beside it; all blocks are in the tables before.
Microseconds of the wall a step, the best of some rounds of 64: once with all requests asking for the same, once with
one of them and the others drawing at a temperature alone.
"""

import argparse
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from bench.rig.machine import describe_machine
from bench.rig.shapes import SHAPES, write_shape
from contract.domain.params import Sampling
from contract.domain.plan import Admission, StepPlan
from penstock import LLM
from worker_svc.core.interface import PendingStep, Runner

PROMPT, WARM, TIMED = 128, 8, 64  # tokens
WINDOW = 2  # steps on their way
KINDS: dict[str, dict[str, Any]] = {
    "temperature": {},
    "greedy": {"temperature": 0.0},
    "top_k=20": {"top_k": 20},
    "top_p=0.95": {"top_p": 0.95},
    "top_k=20 top_p=0.95": {"top_k": 20, "top_p": 0.95},
    "min_p=0.05": {"min_p": 0.05},
    "presence_penalty=0.5": {"presence_penalty": 0.5},
    "repetition_penalty=1.1": {"repetition_penalty": 1.1},
    "logit_bias of 3": {"logit_bias": ((5, 1.0), (6, 2.0), (7, -1.0))},
    "logprobs=5": {"num_logprobs": 5},
    "logprobs=20": {"num_logprobs": 20},
}


def step_us(runner: Runner, asked: Sequence[dict[str, Any]], rounds: int) -> float:
    """Microseconds of a decode step of one sequence for each of `asked`."""
    return min(_round_s(runner, asked) for _ in range(rounds)) / TIMED * 1e6


def _round_s(runner: Runner, asked: Sequence[dict[str, Any]]) -> float:
    limits = runner.limits
    blocks_each = -(-(PROMPT + WARM + TIMED + 1) // limits.block_size)
    at_once = limits.max_num_batched_tokens // PROMPT  # prompts
    slots, step = np.arange(len(asked), dtype=np.uint32), 0
    for first in range(0, len(asked), at_once):
        admissions = tuple(
            Admission(
                slot=slot,
                token_ids=np.full(PROMPT, 1 + slot, np.uint32),
                num_prompt_tokens=PROMPT,
                num_computed_tokens=0,
                block_ids=np.arange(slot * blocks_each, (slot + 1) * blocks_each, dtype=np.uint32),
                sampling=Sampling(**{"temperature": 0.8} | asked[slot]),
                seed=slot,
            )
            for slot in slots[first : first + at_once].tolist()
        )
        step += 1
        entered = slots[first : first + at_once]
        lengths = np.full_like(entered, PROMPT)
        runner.launch(StepPlan(step, admissions=admissions, slots=entered, num_tokens=lengths)).result()
    _decode(runner, slots, step + 1, WARM)
    began_s = time.perf_counter()
    _decode(runner, slots, step + 1 + WARM, TIMED)
    return time.perf_counter() - began_s


def _decode(runner: Runner, slots: np.ndarray, first_step: int, num_steps: int) -> None:
    """So many steps of all `slots`, to their ends."""
    pending: deque[PendingStep] = deque()
    for step in range(first_step, first_step + num_steps):
        pending.append(runner.launch(StepPlan(step, slots=slots, num_tokens=np.ones_like(slots))))
        if len(pending) == WINDOW:
            pending.popleft().result()
    while pending:
        pending.popleft().result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="0.6b", choices=SHAPES)
    parser.add_argument("--batches", default="1,32,256")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print(describe_machine(), flush=True)
    with TemporaryDirectory(prefix="penstock-bench-") as directory:
        write_shape(Path(directory), SHAPES[options.model])
        runner = LLM(directory, load_format="dummy", max_model_len=4096).llm_engine.runner
        print(f"{'sequences':>9} {'asked for':22} {'by one':>9} {'by all':>9}")
        for batch in map(int, options.batches.split(",")):
            for name, kind in KINDS.items():
                by_one = (
                    f"{step_us(runner, [kind, *[{}] * (batch - 1)], options.rounds):9.0f}" if batch > 1 else f"{'–':>9}"
                )
                by_all = step_us(runner, [kind] * batch, options.rounds)
                print(f"{batch:9} {name:22} {by_one} {by_all:9.0f}", flush=True)


if __name__ == "__main__":
    main()
