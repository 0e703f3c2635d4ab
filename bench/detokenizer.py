"""Tokens a second of one detokenizer process, for its whole hop: decode rows, text, stops, encode text.

    penstock bench detokenizer [--model DIR] [--sequences 256] [--steps 400] [--repeats 5]

The log of a shard is made beforehand: one entry a step with one token of each sequence. What is measured is what the
service does with it between reading and writing: decode the entry, take its rows, encode the text for one gateway, and
results with the last step. Cases: prose; prose with stop strings that do not occur; prose with logprobs of the five
most likely tokens; and random tokens, which break characters of several bytes.
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from bench.rig.machine import describe_machine
from bench.rig.prose import prose, train_tokenizer
from contract.domain import chain
from contract.domain.finish import FinishReason
from contract.domain.plan import Logprobs
from contract.domain.rows import TokenRows
from contract.domain.timeline import Computed
from contract.v1 import common_pb2, requests_pb2
from detokenizer_svc import wire
from detokenizer_svc.core.detokenizer import Detokenizer
from detokenizer_svc.core.stats import DetokenizerStats
from detokenizer_svc.shard import Shard
from scheduler_svc.wire import encode_rows
from servicekit.bus import keys as k
from servicekit.bus.calls import Entry
from servicekit.checkpoint.location import find_checkpoint
from servicekit.checkpoint.tokenizer import read_tokenizer

SESSION, ROUTE = b"s" * 16, b"g" * 16
NUM_TOP = 5

Ids = npt.NDArray[np.uint32]  # u32[steps, sequences]


@dataclass(frozen=True)
class Case:
    name: str
    stops: tuple[str, ...] = ()
    has_logprobs: bool = False
    is_random: bool = False


CASES = (
    Case("prose"),
    Case("prose, 2 stop strings", stops=("\n\nHuman:", "<stop>")),
    Case("prose, logprobs 5", has_logprobs=True),
    Case("random tokens", is_random=True),
)


def tokens(case: Case, tokenizer: Tokenizer, num_steps: int, num_sequences: int) -> Ids:
    generator = np.random.default_rng(0)
    shape = (num_steps, num_sequences)
    if case.is_random:
        return generator.integers(1, tokenizer.get_vocab_size(), shape, dtype=np.uint32)
    ids = np.array(tokenizer.encode(prose(), add_special_tokens=False).ids, np.uint32)
    starts = generator.integers(0, len(ids) - num_steps, num_sequences)
    return np.stack([ids[start : start + num_steps] for start in starts], axis=1)


def openings(case: Case, request_ids: list[bytes]) -> Iterator[dict[bytes, bytes]]:
    body = requests_pb2.GenerateRequest(text_options=requests_pb2.TextParameters(stop=case.stops))
    if case.has_logprobs:
        body.sampling.num_logprobs = NUM_TOP
    for request_id in request_ids:
        header = common_pb2.Header(request_id=request_id).SerializeToString()
        yield {k.REQUEST: request_id, k.ROUTE: ROUTE, k.HEADER: header, k.BODY: body.SerializeToString(), k.META: b""}


def log(case: Case, ids: Ids) -> list[Entry]:
    """The entries of a shard: openings, then a batch a step; the last one ends every sequence."""
    num_steps, num_sequences = ids.shape
    request_ids = [number.to_bytes(16, "big") for number in range(num_sequences)]
    entries = [Entry(b"0-1", fields) for fields in openings(case, request_ids)]
    zeros = np.zeros(num_sequences, np.uint32)
    chains = np.full(num_sequences, chain.CHAIN_START, np.uint64)
    for step in range(num_steps):
        top = np.repeat(ids[step], NUM_TOP)
        rows = TokenRows(
            request_ids=request_ids,
            sequences=zeros,
            positions=np.full(num_sequences, step, np.uint32),
            chains=chains,
            counts=np.ones(num_sequences, np.uint32),
            token_ids=ids[step],
            finishes=np.full(num_sequences, FinishReason.LENGTH if step == num_steps - 1 else 0, np.uint8),
            cached_tokens=zeros,
            logprobs=Logprobs(
                np.full(num_sequences, -1.0, np.float32),
                np.ones(num_sequences, np.uint32),
                np.full(num_sequences, NUM_TOP, np.uint32),
                top,
                np.full(len(top), -1.0, np.float32),
            )
            if case.has_logprobs
            else None,
        )
        entries.append(Entry(b"0-1", {k.PAYLOAD: encode_rows(rows, SESSION, Computed("worker-0", SESSION, step + 1))}))
        chains = chain.extend_columns(chains, ids[step])
    return entries


def run(entries: list[Entry], detokenizer: Detokenizer) -> tuple[float, float]:
    """Wall and CPU seconds of the hop over a whole log."""
    shard = Shard(0, k.Keys(), detokenizer.sibling())
    num_openings = sum(k.REQUEST in entry.fields for entry in entries)
    for entry in entries[:num_openings]:
        shard.take(entry)
    wall_s, cpu_s = time.perf_counter(), time.thread_time()
    for entry in entries[num_openings:]:
        effects = shard.take(entry).effects
        for rows in effects.texts.values():
            wire.encode_text(rows, SESSION, 0)
        for retirement in effects.retirements:
            wire.encode_finished(retirement.result)
    return time.perf_counter() - wall_s, time.thread_time() - cpu_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="checkpoint whose tokenizer is used; without it one is trained first")
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    tokenizer = read_tokenizer(find_checkpoint(options.model)) if options.model else train_tokenizer()
    print(describe_machine())
    print(f"{options.sequences} sequences, {options.steps} steps, one token each; best of {options.repeats}\n")
    print(f"{'case':<24} {'tokens/s':>12} {'CPU µs/token':>14}")
    for case in CASES:
        detokenizer = Detokenizer(tokenizer)
        entries = log(case, tokens(case, tokenizer, options.steps, options.sequences))
        spent = [run(entries, detokenizer) for _ in range(options.repeats)]
        num_tokens = options.sequences * options.steps
        wall_s, cpu_s = (min(values) for values in zip(*spent, strict=True))
        print(f"{case.name:<24} {num_tokens / wall_s:>12,.0f} {cpu_s / num_tokens * 1e6:>14.2f}")
        assert detokenizer.stats == DetokenizerStats(num_tokens * options.repeats)


if __name__ == "__main__":
    main()
