"""What a decode step takes by what its requests ask of the sampler, in one process.

    penstock bench sampling [--model 0.6b] [--batches 1,32,256]

Shapes of a published model, random weights. A step is the difference between 80 and 16 tokens of the same prompts,
which are in the prefix cache, by 64: microseconds of the wall, the best of some rounds. Once with all requests asking
for the same, once with one of them and the others drawing at a temperature alone.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.rig.machine import describe_machine
from bench.rig.qwen3 import SIZES, write_qwen3
from penstock import LLM, SamplingParams

PROMPT, SHORT, LONG = 128, 16, 80  # tokens
KINDS: dict[str, dict[str, Any]] = {
    "temperature": {},
    "greedy": {"temperature": 0.0},
    "top_k=20": {"top_k": 20},
    "top_p=0.95": {"top_p": 0.95},
    "top_k=20 top_p=0.95": {"top_k": 20, "top_p": 0.95},
    "min_p=0.05": {"min_p": 0.05},
    "presence_penalty=0.5": {"presence_penalty": 0.5},
    "logit_bias of 3": {"logit_bias": {5: 1.0, 6: 2.0, 7: -1.0}},
    "logprobs=5": {"logprobs": 5},
}


def step_us(llm: LLM, asked: Sequence[dict[str, Any]], rounds: int) -> float:
    """Microseconds of a decode step of one sequence for each of `asked`."""
    prompts = [{"prompt_token_ids": [1 + index] * PROMPT} for index in range(len(asked))]

    def seconds(num_tokens: int) -> float:
        params = [
            SamplingParams(**{"temperature": 0.8, "ignore_eos": True, "max_tokens": num_tokens} | each)
            for each in asked
        ]
        began_s = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - began_s

    # The shortest of each, not the shortest difference: whatever disturbs a short run would shorten that.
    seconds(SHORT)
    short_s, long_s = (min(seconds(length) for _ in range(rounds)) for length in (SHORT, LONG))
    return (long_s - short_s) / (LONG - SHORT) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="0.6b", choices=SIZES)
    parser.add_argument("--batches", default="1,32,256")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print(describe_machine(), flush=True)
    with TemporaryDirectory(prefix="penstock-bench-") as directory:
        write_qwen3(Path(directory), options.model)
        llm = LLM(directory, load_format="dummy", max_model_len=4096)
        print(f"{'sequences':>9} {'asked for':22} {'by one':>9} {'by all':>9}")
        for batch in map(int, options.batches.split(",")):
            for name, kind in KINDS.items():
                by_one = (
                    f"{step_us(llm, [kind, *[{}] * (batch - 1)], options.rounds):9.0f}" if batch > 1 else f"{'–':>9}"
                )
                by_all = step_us(llm, [kind] * batch, options.rounds)
                print(f"{batch:9} {name:22} {by_one} {by_all:9.0f}", flush=True)


if __name__ == "__main__":
    main()
