"""CPU time of the scheduler's core for one step: `schedule` and `apply`, all sequences decoding.

    python bench/scheduler.py [--running 256] [--waiting 0 10000] [--steps 2000] [--window 2]

Prints microseconds a step: the median and the 99th percentile over all steps, in which every 16th token of a sequence
needs a new block and fills an old one. The worker is replaced by ready-made results.
"""

import argparse
import time
from collections import deque

import numpy as np

from penstock.domain.params import Stopping
from penstock.domain.plan import StepPlan, StepResult
from scheduler_svc.core.scheduler import Scheduler, SchedulerConfig, WorkerLimits
from scheduler_svc.core.sequence import QueuedRequest


def request(number: int, generator: np.random.Generator) -> QueuedRequest:
    prompt = generator.integers(0, 32_000, 100 + number % 64, dtype=np.uint32)
    stopping = Stopping(max_tokens=100_000)
    return QueuedRequest(number.to_bytes(16, "big"), prompt, stopping=stopping, eos_token_ids=(1,), arrival_ns=number)


def answer(plan: StepPlan, generator: np.random.Generator) -> StepResult:
    tokens = generator.integers(2, 32_000, len(plan.slots), dtype=np.uint32)
    return StepResult(plan.step, plan.slots, np.ones(len(plan.slots), np.uint32), tokens)


def measure(num_running: int, num_waiting: int, num_steps: int, window: int) -> tuple[list[int], list[int]]:
    generator = np.random.default_rng(0)
    config = SchedulerConfig(window=window, max_num_batched_tokens=1 << 20, max_waiting=1 << 20)
    scheduler = Scheduler(config)
    for number in range(num_running + num_waiting):
        scheduler.add(request(number, generator), 0)
    num_blocks = num_running * (200 + num_steps // 16)
    scheduler.add_worker("w", WorkerLimits(num_blocks, 16, num_running, 200_000))
    first = scheduler.schedule("w", 0)
    assert first is not None
    assert len(first.slots) == num_running
    scheduler.apply("w", answer(first, generator), 0)
    in_flight: deque[StepPlan] = deque()
    for _ in range(window - 1):
        plan = scheduler.schedule("w", 0)
        assert plan is not None
        in_flight.append(plan)
    schedule_ns, apply_ns = [], []
    for _ in range(num_steps):
        start = time.perf_counter_ns()
        plan = scheduler.schedule("w", 0)
        planned = time.perf_counter_ns()
        assert plan is not None
        assert len(plan.slots) == num_running
        in_flight.append(plan)
        result = answer(in_flight.popleft(), generator)
        before = time.perf_counter_ns()
        scheduler.apply("w", result, 0)
        apply_ns.append(time.perf_counter_ns() - before)
        schedule_ns.append(planned - start)
    return schedule_ns, apply_ns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, nargs="+", default=[32, 256, 1024])
    parser.add_argument("--waiting", type=int, nargs="+", default=[0, 10_000])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--window", type=int, default=2)
    options = parser.parse_args()
    print("running waiting | schedule p50 p99 | apply p50 p99 | both p50 p99   (microseconds a step)")
    for num_running in options.running:
        for num_waiting in options.waiting:
            schedule_ns, apply_ns = measure(num_running, num_waiting, options.steps, options.window)
            both = np.array(schedule_ns) + np.array(apply_ns)
            columns = [np.percentile(values, (50, 99)) / 1e3 for values in (schedule_ns, apply_ns, both)]
            figures = " | ".join(f"{median:7.0f} {tail:7.0f}" for median, tail in columns)
            print(f"{num_running:7d} {num_waiting:7d} | {figures}")


if __name__ == "__main__":
    main()
