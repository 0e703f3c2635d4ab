"""`penstock bench throughput`: all requests at once to `LLM` in this process, and how long that took."""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

from contract.domain.params import SamplingParams
from penstock.benchmark.datasets import add_dataset, make_samples, tokenizer_of
from penstock.benchmark.engine_flags import add_engine, make_engine


def main(argv: Sequence[str]) -> int:
    """Runs it; the exit status."""
    parser = argparse.ArgumentParser(prog="penstock bench throughput", description=__doc__, allow_abbrev=False)
    add_engine(parser)
    add_dataset(parser)
    parser.add_argument("--ignore-eos", action=argparse.BooleanOptionalAction, default=True, help="[True]")
    parser.add_argument("--temperature", type=float, default=1.0, help="[1]")
    parser.add_argument("--output-json", type=Path, metavar="FILE", help="the figures as JSON")
    arguments = parser.parse_args(argv)
    samples = make_samples(arguments, tokenizer_of(arguments.tokenizer or arguments.model))
    llm = make_engine(arguments)
    params = [
        SamplingParams(temperature=arguments.temperature, max_tokens=each.output_len, ignore_eos=arguments.ignore_eos)
        for each in samples
    ]
    prompts = [each.prompt if isinstance(each.prompt, str) else {"prompt_token_ids": each.prompt} for each in samples]
    llm.generate(prompts[:1], params[:1], use_tqdm=False)  # what is compiled at first use is not measured
    begin_s = time.perf_counter()
    outputs = llm.generate(prompts, params)
    elapsed_s = time.perf_counter() - begin_s
    prompt_tokens = sum(len(each.prompt_token_ids) for each in outputs)
    output_tokens = sum(len(each.outputs[0].token_ids) for each in outputs)
    found = {
        "elapsed_time": elapsed_s,
        "num_requests": len(outputs),
        "total_num_tokens": prompt_tokens + output_tokens,
        "total_output_tokens": output_tokens,
        "requests_per_second": len(outputs) / elapsed_s,
        "tokens_per_second": (prompt_tokens + output_tokens) / elapsed_s,
        "output_tokens_per_second": output_tokens / elapsed_s,
    }
    print(
        f"Throughput: {found['requests_per_second']:.2f} requests/s, {found['tokens_per_second']:.2f} total tokens/s, "
        f"{found['output_tokens_per_second']:.2f} output tokens/s"
    )
    print(
        f"{len(outputs)} requests, {prompt_tokens} prompt tokens and {output_tokens} output tokens in {elapsed_s:.2f} s"
    )
    if arguments.output_json is not None:
        arguments.output_json.write_text(json.dumps(found, indent=1), "utf-8")
    return 0
