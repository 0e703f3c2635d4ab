"""Prompts of 4,000 characters a second through the tokenizer's hop, against `encode_batch_fast` alone.

    penstock bench tokenizer [--model DIR] [--chars 4000] [--texts 200] [--repeats 5]

The hop is what the service does with a prompt between reading and writing: decode the stored request, check it,
tokenize, encode the tokens. The reference encodes the same texts, one call each, on the same thread; tokens become the
same number of ids in both. Threads of the tokenizer library are off, as they are for single texts.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.rig.machine import describe_machine
from bench.rig.prose import prose, write_checkpoint
from contract.v1 import common_pb2, requests_pb2
from tokenizer_svc import wire
from tokenizer_svc.core.tokenize import PromptTokenizer
from tokenizer_svc.loading import load_vocabulary


def texts(num_texts: int, num_chars: int) -> list[str]:
    source = prose()
    return [source[(start := i * 997 % (len(source) - num_chars)) : start + num_chars] for i in range(num_texts)]


def measure(works: Sequence[Callable[[], int]], repeats: int) -> list[tuple[float, float, int]]:
    """Of each: best wall seconds, best CPU seconds, and the number of tokens. They take turns, so that a machine that
    does other things besides slows all of them down."""
    spent: list[list[tuple[float, float, int]]] = [[] for _ in works]
    for _ in range(repeats):
        for work, times in zip(works, spent, strict=True):
            wall_s, cpu_s = time.perf_counter(), time.process_time()
            num_tokens = work()
            times.append((time.perf_counter() - wall_s, time.process_time() - cpu_s, num_tokens))
    return [(min(t[0] for t in times), min(t[1] for t in times), times[0][2]) for times in spent]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="checkpoint whose tokenizer is used; without it one is trained first")
    parser.add_argument("--chars", type=int, default=4000)
    parser.add_argument("--texts", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or str(write_checkpoint(Path(folder)))
        prompts = PromptTokenizer(load_vocabulary(model))
    tokenizer = prompts.vocabulary.tokenizer
    wanted = texts(options.texts, options.chars)
    header = common_pb2.Header(request_id=b"r" * 16).SerializeToString()
    parts = [requests_pb2.GenerateRequest(text=text).SerializeToString() for text in wanted]

    def reference() -> int:
        return sum(len(tokenizer.encode_batch_fast([text])[0].ids) for text in wanted)

    def hop() -> int:
        num_tokens = 0
        for part in parts:
            request = wire.decode_request(wire.decode_header(header), wire.decode_body(b"", part))
            prompt = prompts.tokenize(request)
            wire.encode_tokenized(prompt)
            num_tokens += len(prompt.token_ids)
        return num_tokens

    measured = measure((reference, hop), options.repeats)
    num_tokens = measured[0][2]
    assert measured[1][2] == num_tokens
    print(describe_machine())
    print(f"{options.texts} texts of {options.chars} characters, {num_tokens} tokens; best of {options.repeats}\n")
    print(f"{'':<20} {'texts/s':>10} {'tokens/s':>12} {'CPU µs/token':>14}")
    for name, (wall_s, cpu_s, _) in zip(("encode_batch_fast", "whole hop"), measured, strict=True):
        per_token_us = cpu_s / num_tokens * 1e6
        print(f"{name:<20} {options.texts / wall_s:>10,.0f} {num_tokens / wall_s:>12,.0f} {per_token_us:>14.2f}")
    print(
        f"\nratio {measured[0][0] / measured[1][0]:.2f} by wall time, {measured[0][1] / measured[1][1]:.2f} by CPU time"
    )


if __name__ == "__main__":
    main()
