"""CPU time of a scheduler for one step in which all sequences decode: `schedule`, `apply`, and the wire.

    python bench/scheduler.py [--running 256] [--waiting 0 10000] [--steps 2000] [--plans-in-flight 2]

Prints microseconds of the thread's CPU time a step: median and 99th percentile over all steps, in which every 16th
token of a sequence needs a new block and fills an old one. The wire is: encode the plan, decode the result, encode the
rows. The worker is replaced by ready-made results.
"""

import argparse
import time
from collections import deque

import numpy as np
import numpy.typing as npt

from contract.domain.params import Stopping
from contract.domain.plan import StepPlan, StepResult
from contract.domain.timeline import Computed
from contract.v1 import results_pb2
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.limits import WorkerLimits
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import QueuedRequest
from scheduler_svc.wire import decode_result, encode_plan, encode_rows

SESSION, INCARNATION = b"s" * 16, b"i" * 16


def encode_result(result: StepResult) -> bytes:
    columns = {name: getattr(result, name).astype("<u4").tobytes() for name in ("slots", "counts", "token_ids")}
    return results_pb2.StepResult(step=result.step, **columns).SerializeToString()


def request(number: int, generator: np.random.Generator) -> QueuedRequest:
    prompt = generator.integers(0, 32_000, 100 + number % 64, dtype=np.uint32)
    stopping = Stopping(max_tokens=100_000)
    return QueuedRequest(number.to_bytes(16, "big"), prompt, stopping=stopping, eos_token_ids=(1,), arrival_ns=number)


def answer(plan: StepPlan, generator: np.random.Generator) -> StepResult:
    tokens = generator.integers(2, 32_000, len(plan.slots), dtype=np.uint32)
    return StepResult(plan.step, plan.slots, np.ones(len(plan.slots), np.uint32), tokens)


def measure(num_running: int, num_waiting: int, num_steps: int, window: int) -> npt.NDArray[np.int64]:
    generator = np.random.default_rng(0)
    config = SchedulerConfig(plans_in_flight=window, max_num_batched_tokens=1 << 20, max_waiting_seqs=1 << 20)
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
    spent: list[tuple[int, int, int]] = []
    for _ in range(num_steps):
        start = time.thread_time_ns()
        plan = scheduler.schedule("w", 0)
        planned = time.thread_time_ns()
        assert plan is not None
        assert len(plan.slots) == num_running
        encode_plan(plan, SESSION, INCARNATION, 0)
        plan_encoded = time.thread_time_ns()
        in_flight.append(plan)
        payload = encode_result(answer(in_flight.popleft(), generator))
        begun = time.thread_time_ns()
        received = decode_result(payload)
        decoded = time.thread_time_ns()
        rows = scheduler.apply("w", received.result, 0)
        applied = time.thread_time_ns()
        encode_rows(rows, SESSION, Computed("w", INCARNATION, plan.step))
        end = time.thread_time_ns()
        wire_ns = plan_encoded - planned + decoded - begun + end - applied
        spent.append((planned - start, applied - decoded, wire_ns))
    return np.array(spent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, nargs="+", default=[32, 256, 1024])
    parser.add_argument("--waiting", type=int, nargs="+", default=[0, 10_000])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--plans-in-flight", type=int, default=2)
    options = parser.parse_args()
    print("                |        schedule |           apply |            wire |             all")
    print(
        "running waiting |     p50     p99 |     p50     p99 |     p50     p99 |     p50     p99  microseconds a step"
    )
    for num_running in options.running:
        for num_waiting in options.waiting:
            spent = measure(num_running, num_waiting, options.steps, options.plans_in_flight)
            columns = [np.percentile(values, (50, 99)) / 1e3 for values in (*spent.T, spent.sum(axis=1))]
            figures = " | ".join(f"{median:7.0f} {tail:7.0f}" for median, tail in columns)
            print(f"{num_running:7d} {num_waiting:7d} | {figures}")


if __name__ == "__main__":
    main()
