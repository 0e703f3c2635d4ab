"""One tensor-parallel rank in a process of its own; here so that a spawned process can import it."""

import time
from typing import Any

import torch
from plans import Drive, drive

from worker_svc.factory import load_runner
from worker_svc.runner_options import RunnerOptions


def prompt_values(sequence: Drive) -> list[list[float]]:
    """The logprobs of a prompt, its ranks, and what was likeliest; or its vector; none: nobody asked."""
    if sequence.vector is not None:
        return [sequence.vector.tolist()]
    if sequence.prompt is None:
        return []
    logprobs = sequence.prompt.logprobs
    columns = (logprobs.sampled, logprobs.ranks, logprobs.top_logprobs)
    return [column.tolist() for column in columns]


def run_rank(rank: int, asked: Any, answers: Any) -> None:
    """Take options and sequences from `asked` until None comes; put rank, blocks and outputs of each into `answers`."""
    torch.set_num_threads(1)
    while (work := asked.get()) is not None:
        answers.put((rank, *_run(rank, *work)))


def _run(rank: int, options: dict[str, Any], sequences: list[Drive]) -> tuple[int, list[Any]]:
    # Rank 1 has less memory: the worker must keep to what it has.
    kv_bytes = options.pop("kv_bytes")[rank]
    loaded = load_runner(RunnerOptions(rank=rank, kv_cache_memory_bytes=kv_bytes, **options), time.monotonic_ns)
    drive(loaded.runner, sequences, chunk=40, stagger=1)
    outputs = [(sequence.output, sequence.logprobs, prompt_values(sequence)) for sequence in sequences]
    num_blocks = loaded.runner.limits.num_blocks
    loaded.close()
    return num_blocks, outputs
