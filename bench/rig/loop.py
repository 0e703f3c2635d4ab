"""The loop that the pipeline is compared with: the same cores in one process, host and device overlapped."""

import time
from collections import deque

import numpy as np

from contract.domain.params import Sampling, Stopping
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.limits import WorkerLimits
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import QueuedRequest
from worker_svc.core.interface import Limits, PendingStep
from worker_svc.core.simulated import SimulatedConfig, SimulatedRunner

WINDOW = 2
NUM_PROMPT_TOKENS = 16
BLOCK_SIZE = 16
VOCAB_SIZE = 8192
_WORKER = "w"


def limits_for(num_seqs: int, num_steps: int) -> Limits:
    """Room for all sequences to decode so many steps without a preemption."""
    max_model_len = NUM_PROMPT_TOKENS + num_steps
    num_blocks = num_seqs * -(-max_model_len // BLOCK_SIZE)
    return Limits(num_blocks, BLOCK_SIZE, num_seqs, max_model_len, max(2048, num_seqs), VOCAB_SIZE)


def measure_loop(num_seqs: int, step_s: float, num_steps: int) -> float:
    """Steps per second while all sequences decode: schedule, launch ahead, wait, apply; no bus, no text."""
    limits = limits_for(num_seqs, num_steps)
    runner = SimulatedRunner(limits, SimulatedConfig(step_s), time.monotonic_ns, time.sleep)
    scheduler = Scheduler(SchedulerConfig(plans_in_flight=WINDOW, max_num_batched_tokens=limits.max_num_batched_tokens))
    scheduler.add_worker(
        _WORKER,
        WorkerLimits(
            limits.num_blocks,
            limits.block_size,
            limits.max_num_seqs,
            limits.max_model_len,
            limits.max_num_batched_tokens,
        ),
    )
    rng = np.random.default_rng(0)
    for number in range(num_seqs):
        prompt = rng.integers(0, VOCAB_SIZE, NUM_PROMPT_TOKENS, dtype=np.uint32)
        request = QueuedRequest(
            number.to_bytes(16, "big"),
            prompt,
            sampling=Sampling(temperature=0.0),
            stopping=Stopping(num_steps, ignore_eos=True),
        )
        scheduler.add(request, 0)
    pending: deque[PendingStep] = deque()
    times_s: list[float] = []
    while True:
        while (plan := scheduler.schedule(_WORKER, time.time_ns())) is not None:
            pending.append(runner.launch(plan))
        if not pending:
            break
        scheduler.apply(_WORKER, pending.popleft().result(), time.time_ns())
        times_s.append(time.perf_counter())
    return rate(times_s, num_steps // 10, num_steps - 1)


def rate(times_s: list[float], first: int, last: int) -> float:
    """Events per second between the `first` and the `last` of them."""
    return (last - first) / (times_s[last] - times_s[first])
