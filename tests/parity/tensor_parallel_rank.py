"""Tensor-parallel ranks in processes of their own; here so that a spawned process can import them."""

import contextlib
import multiprocessing
import queue
import time
from typing import Any

import torch
from plans import Drive, drive

from worker_svc.core.interface import Limits
from worker_svc.factory import load_runner
from worker_svc.runner_options import RunnerOptions

LIMIT_S = 1200


class Ranks:
    """Two processes, which load one model after the other: most of a test's time would be their start."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._asked = [context.Queue() for _ in range(2)]
        self._answers = context.Queue()
        self._processes = [
            context.Process(target=run_rank, args=(rank, asked, self._answers), daemon=True)
            for rank, asked in enumerate(self._asked)
        ]
        for process in self._processes:
            process.start()

    def ask(self, options: dict[str, Any], sequences: list[Drive]) -> None:
        for asked in self._asked:
            asked.put((options, sequences))

    def answers(self) -> dict[int, list[Any]]:
        """By rank: the limits, the outputs, and how many CUDA graphs there were: of decode steps, and with chunks."""
        return {rank: rest for rank, *rest in (self._answer() for _ in self._processes)}

    def _answer(self) -> Any:
        """The next, from any rank; a rank that has ended gives none."""
        until_s = time.monotonic() + LIMIT_S
        while time.monotonic() < until_s:
            with contextlib.suppress(queue.Empty):
                return self._answers.get(timeout=1)
            assert all(process.is_alive() for process in self._processes), "a rank failed: its own output says why"
        raise AssertionError("no rank answers")

    def close(self) -> None:
        for asked in self._asked:
            asked.put(None)
        for process in self._processes:
            process.join(timeout=LIMIT_S)
            assert process.exitcode == 0


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
    """Take options and sequences from `asked` until None comes; put into `answers` what came of each."""
    torch.set_num_threads(1)
    while (work := asked.get()) is not None:
        answers.put((rank, *_run(rank, *work)))


def _run(rank: int, options: dict[str, Any], sequences: list[Drive]) -> tuple[Limits, list[Any], tuple[int, int]]:
    # Rank 1 may have less memory: the worker must keep to what it has.
    kv_bytes = options.pop("kv_bytes", (None, None))[rank]
    loaded = load_runner(RunnerOptions(rank=rank, kv_cache_memory_bytes=kv_bytes, **options), time.monotonic_ns)
    drive(loaded.runner, sequences, chunk=40, stagger=1)
    outputs = [(sequence.output, sequence.logprobs, prompt_values(sequence)) for sequence in sequences]
    limits, num_graphs = loaded.runner.limits, _count_graphs(loaded.runner)
    loaded.close()
    return limits, outputs, num_graphs


def _count_graphs(runner: Any) -> tuple[int, int]:
    """CUDA graphs of decode steps, and of steps with chunks."""
    decoder = runner._decoder
    chunks = getattr(decoder, "_chunks", None)
    return len(getattr(decoder, "_graphs", ())), len(chunks._graphs) if chunks is not None else 0
