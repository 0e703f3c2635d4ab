"""`penstock bench latency`: one batch after the other through `LLM` in this process, and how long each took."""

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from contract.domain.params import SamplingParams
from penstock.benchmark.datasets import positive, tokenizer_of
from penstock.benchmark.engine_flags import add_engine, make_engine

_PERCENTILES = (10, 25, 50, 75, 90, 99)


def main(argv: Sequence[str]) -> int:
    """Runs it; the exit status."""
    parser = argparse.ArgumentParser(prog="penstock bench latency", description=__doc__, allow_abbrev=False)
    add_engine(parser)
    for name, default, meaning in (
        ("input-len", 32, "tokens of a prompt"),
        ("output-len", 128, "tokens of an output"),
        ("batch-size", 8, "prompts at once"),
        ("num-iters-warmup", 10, "batches before, not counted"),
        ("num-iters", 30, "batches that are counted"),
    ):
        parser.add_argument(f"--{name}", type=positive, default=default, metavar="N", help=f"{meaning} [{default}]")
    parser.add_argument("--output-json", type=Path, metavar="FILE", help="the figures as JSON")
    arguments = parser.parse_args(argv)
    num_ids = tokenizer_of(arguments.tokenizer or arguments.model)().get_vocab_size()
    llm = make_engine(arguments)
    draw = random.Random(0)
    params = SamplingParams(temperature=1.0, max_tokens=arguments.output_len, ignore_eos=True)

    def batch() -> float:
        # New prompts each time: none is found in the prefix cache.
        prompts = [
            {"prompt_token_ids": [draw.randrange(num_ids) for _ in range(arguments.input_len)]}
            for _ in range(arguments.batch_size)
        ]
        begin_s = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - begin_s

    is_quiet = not sys.stderr.isatty()
    for _ in tqdm(range(arguments.num_iters_warmup), desc="Warmup", disable=is_quiet):
        batch()
    latencies = [batch() for _ in tqdm(range(arguments.num_iters), desc="Batches", disable=is_quiet)]
    found = {each: float(np.percentile(latencies, each)) for each in _PERCENTILES}
    print(f"Avg latency: {np.mean(latencies):.4f} seconds")
    for each, latency in found.items():
        print(f"{each}% percentile latency: {latency:.4f} seconds")
    if arguments.output_json is not None:
        told = {"avg_latency": float(np.mean(latencies)), "latencies": latencies, "percentiles": found}
        arguments.output_json.write_text(json.dumps(told, indent=1), "utf-8")
    return 0
