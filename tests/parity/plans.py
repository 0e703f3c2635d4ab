"""Drives a runner by plans made by hand: fixed block tables, chunked prefill, decoding, W plans in flight."""

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from contract.domain.params import Sampling
from contract.domain.plan import F32, Admission, PromptLogprobs, StepPlan, StepResult
from contract.domain.pooling import Pooling
from worker_svc.core.interface import PendingStep, Runner


@dataclass
class Drive:
    """One sequence: what to ask, and what came out."""

    token_ids: list[int]
    max_tokens: int
    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=0.0))
    seed: int = 0
    min_output_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    tops: list[dict[int, float]] = field(default_factory=list)
    prompt: PromptLogprobs | None = None  # if asked for, once complete
    pooling: Pooling | None = None  # with `max_tokens` 1: there is none
    vector: F32 | None = None  # likewise


@dataclass
class DriveStats:
    """What the plans really did."""

    num_steps: int = 0
    num_chunked: int = 0  # prefill steps that did not reach the end of the prompt
    num_mixed: int = 0  # steps that both decoded and prefilled
    most_in_flight: int = 0


def drive(runner: Runner, sequences: list[Drive], chunk: int = 512, window: int = 1, stagger: int = 0) -> DriveStats:
    """Run all sequences to their `max_tokens`; sequence i enters `i * stagger` steps late. Blocks are dealt out in a
    shuffled order, so that tables are not contiguous.
    """
    limits, stats = runner.limits, DriveStats()
    blocks = iter(np.random.default_rng(7).permutation(limits.num_blocks))
    computed = [0] * len(sequences)
    planned = [len(sequence.token_ids) for sequence in sequences]  # tokens known once what is in flight is done
    sizes = [kind.block_size for kind in limits.kinds]
    room = [list(sizes) for _ in sequences]  # tokens that a sequence's blocks of each kind hold
    released: list[int] = []
    in_flight: deque[PendingStep] = deque()
    running: list[int] = []
    waiting = deque(range(len(sequences)))
    while waiting or running:
        stats.num_steps += 1
        admissions, appends, rows = [], [], []
        while waiting and waiting[0] * stagger < stats.num_steps:
            slot = waiting.popleft()
            sequence = sequences[slot]
            admissions.append(
                Admission(
                    slot=slot,
                    token_ids=np.array(sequence.token_ids, np.uint32),
                    num_prompt_tokens=len(sequence.token_ids),
                    num_computed_tokens=0,
                    block_ids=np.array([next(blocks) for _ in sizes], np.uint32),
                    block_counts=np.ones(len(sizes), np.uint32),
                    sampling=sequence.sampling,
                    seed=sequence.seed,
                    min_output_tokens=sequence.min_output_tokens,
                    stop_token_ids=sequence.stop_token_ids,
                    eos_token_ids=sequence.eos_token_ids,
                    request_id=slot.to_bytes(16, "big"),
                    prompt_logprobs=sequence.sampling.num_prompt_logprobs is not None,
                    pooling=sequence.pooling,
                )
            )
            running.append(slot)
        decodes = prefills = 0
        for slot in running:
            num = min(chunk, planned[slot] - computed[slot])
            prefills += num > 1
            decodes += num == 1
            computed[slot] += num
            for kind, size in enumerate(sizes):
                while room[slot][kind] < computed[slot]:
                    appends.append((slot, next(blocks), kind))
                    room[slot][kind] += size
            rows.append((slot, num))
            if computed[slot] == planned[slot]:
                planned[slot] += 1
            else:
                stats.num_chunked += 1
        stats.num_mixed += bool(prefills and decodes)
        plan = StepPlan(
            step=stats.num_steps,
            released_slots=np.array(released, np.uint32),
            admissions=tuple(admissions),
            append_slots=np.array([slot for slot, _, _ in appends], np.uint32),
            append_blocks=np.array([block for _, block, _ in appends], np.uint32),
            append_kinds=np.array([kind for _, _, kind in appends], np.uint32),
            slots=np.array([slot for slot, _ in rows], np.uint32),
            num_tokens=np.array([num for _, num in rows], np.uint32),
        )
        in_flight.append(runner.launch(plan))
        stats.most_in_flight = max(stats.most_in_flight, len(in_flight))
        if len(in_flight) >= window:
            collect(in_flight.popleft().result(), sequences)
        released = [
            slot for slot in running if planned[slot] - len(sequences[slot].token_ids) == sequences[slot].max_tokens
        ]
        running = [slot for slot in running if slot not in released]
    while in_flight:
        collect(in_flight.popleft().result(), sequences)
    return stats


def collect(result: StepResult, sequences: list[Drive]) -> None:
    """Hand a result's tokens to their sequences."""
    for request_id, prompt in result.prompts.items():
        sequence = sequences[int.from_bytes(request_id, "big")]
        assert sequence.prompt is None
        assert not sequence.output
        sequence.prompt = prompt
    for request_id, vector in result.vectors.items():
        sequence = sequences[int.from_bytes(request_id, "big")]
        assert sequence.vector is None
        sequence.vector = vector
    token, top = 0, 0
    for slot, count in zip(result.slots.tolist(), result.counts.tolist(), strict=True):
        sequence = sequences[slot]
        for _ in range(count):
            sequence.output.append(int(result.token_ids[token]))
            if result.logprobs is not None:
                stop = top + int(result.logprobs.top_counts[token])
                sequence.logprobs.append(float(result.logprobs.sampled[token]))
                sequence.ranks.append(int(result.logprobs.ranks[token]))
                ids, values = result.logprobs.top_ids[top:stop], result.logprobs.top_logprobs[top:stop]
                sequence.tops.append(dict(zip(ids.tolist(), values.tolist(), strict=True)))
                top = stop
            token += 1


def drive_few_and_many_rows(runner: Runner) -> list[Drive]:
    """Greedy sequences whose steps have one row, some, and more than kernels for few rows multiply."""
    greedy = Sampling(temperature=0.0, num_logprobs=5)
    sequences = [Drive(list(range(5, 5 + length)), 3, greedy) for length in (150, 20, 1)]
    drive(runner, sequences[:1], chunk=140)
    drive(runner, sequences[1:], chunk=32)
    return sequences
