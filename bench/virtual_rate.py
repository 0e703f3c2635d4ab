"""The row `rate` of `bench gpu` in virtual time: the scheduler's core and its pacing, and a device that is a formula.

Tells what a change of the scheduling does to the time to the first token and to the gaps between tokens, in seconds and
without a GPU; not how fast a device is. A step takes a fixed time, the longer of a least time and one for each row, and
one for each sequence that decodes: the defaults are Qwen3-8B on an H200. The first seed is that of `bench gpu`, whose
requests come at the same times.

    penstock bench virtual-rate [--max-num-batched-tokens 1536] [--seeds 7]
"""

import argparse
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from bench.rig.work import RATE_PER_S, draw_rate
from contract.domain.params import Stopping
from contract.domain.plan import StepPlan, StepResult
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.limits import WorkerLimits
from scheduler_svc.core.pacing import Pacing
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import QueuedRequest

MS = 1_000_000  # nanoseconds
WORKER = "w"


@dataclass(frozen=True, slots=True)
class Times:
    """What takes how long, milliseconds."""

    fixed: float  # of a step
    least: float  # of a step's rows
    row: float
    decode: float  # of a sequence that decodes, beside its row
    to_scheduler: float  # of a request
    to_device: float  # of a plan
    to_client: float  # of a token, from the end of its step
    back: float = 1.0  # of a result

    def step_ns(self, plan: StepPlan) -> int:
        """The device time of a plan."""
        num_decodes = int((plan.num_tokens == 1).sum())
        rows_ms = max(self.least, self.row * int(plan.num_tokens.sum()))
        return round((self.fixed + rows_ms + self.decode * num_decodes) * MS)


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request."""

    sent_ns: int
    num_prompt_tokens: int
    num_tokens: int  # of its output


def arrivals(seed: int, rate: float) -> list[Arrival]:
    """The requests of the row `rate`; its own seed is 0."""
    drawn = draw_rate(random.Random(seed), rate)
    return [Arrival(round(sent_s * 1e9), *lengths) for sent_s, *lengths in zip(*drawn, strict=True)]


@dataclass(slots=True)
class Launched:
    """A step on the device, or its result on the way."""

    plan: StepPlan
    comes_ns: int  # the result, to the scheduler
    step_ns: int
    idle_ns: int  # this and the next as `Pacing.answer` has them
    slack_ns: int
    slots: list[int]  # that sample


@dataclass(slots=True)
class Device:
    """Steps one after the other."""

    times: Times
    free_ns: int = 0
    launched: deque[Launched] = field(default_factory=deque)
    _behind: dict[int, int] = field(default_factory=dict)  # by slot: tokens that are known and not computed

    def launch(self, plan: StepPlan, now_ns: int) -> None:
        """Begin a plan that was made now, once it is there and the steps before it have ended."""
        for slot in plan.released_slots.tolist():
            del self._behind[slot]
        for each in plan.admissions:
            self._behind[each.slot] = len(each.token_ids) - each.num_computed_tokens
        slots = []
        for slot, count in zip(plan.slots.tolist(), plan.num_tokens.tolist(), strict=True):
            self._behind[slot] -= count
            if not self._behind[slot]:
                slots.append(slot)
                self._behind[slot] = 1
        ready_ns, step_ns = now_ns + round(self.times.to_device * MS), self.times.step_ns(plan)
        slack_ns = self.free_ns - ready_ns
        idle_ns = max(0, -slack_ns) if self.free_ns else 0
        self.free_ns = max(self.free_ns, ready_ns) + step_ns
        comes_ns = self.free_ns + round(self.times.back * MS)
        self.launched.append(Launched(plan, comes_ns, step_ns, idle_ns, slack_ns, slots))


def run(requests: Sequence[Arrival], times: Times, config: SchedulerConfig) -> list[list[int]]:
    """When each request's tokens reach its client, nanoseconds."""
    scheduler, pacing, device = Scheduler(config), Pacing(), Device(times)
    scheduler.add_worker(WORKER, WorkerLimits(num_blocks=1 << 16, block_size=16, max_num_seqs=512, max_model_len=4096))
    coming = deque((each.sent_ns + round(times.to_scheduler * MS), number) for number, each in enumerate(requests))
    told: list[list[int]] = [[] for _ in requests]
    now_ns = 0
    while coming or scheduler.requests:
        while coming and coming[0][0] <= now_ns:
            number = coming.popleft()[1]
            scheduler.add(_queued(number, requests[number]), now_ns)
        while device.launched and device.launched[0].comes_ns <= now_ns:
            ended = device.launched.popleft()
            pacing.answer(ended.plan.step, ended.step_ns, ended.idle_ns, ended.slack_ns, now_ns)
            slots = np.array(ended.slots, np.uint32)
            tokens = np.full_like(slots, 7)
            rows = scheduler.apply(WORKER, StepResult(ended.plan.step, slots, np.ones_like(slots), tokens), now_ns)
            for request_id in rows.request_ids:
                at_ns = ended.comes_ns + round((times.to_client - times.back) * MS)
                told[int.from_bytes(request_id, "big")].append(at_ns)
        events = [device.launched[0].comes_ns] if device.launched else []
        events += [coming[0][0]] if coming else []
        if scheduler.may_plan(WORKER):
            if (due_ns := pacing.due_ns(now_ns)) > now_ns:
                events.append(due_ns)
            elif (plan := scheduler.schedule(WORKER, now_ns)) is not None:
                pacing.issue(plan.step, plan.num_tokens, now_ns)
                device.launch(plan, now_ns)
                continue
        if not events:
            break  # all have ended
        now_ns = max(now_ns, min(events))
    return told


def _queued(number: int, arrival: Arrival) -> QueuedRequest:
    prompt = np.random.default_rng(number).integers(0, 32_000, arrival.num_prompt_tokens, dtype=np.uint32)
    stopping = Stopping(max_tokens=arrival.num_tokens)
    return QueuedRequest(number.to_bytes(16, "big"), prompt, stopping=stopping, arrival_ns=number)


def _figures(requests: Sequence[Arrival], told: Sequence[Sequence[int]]) -> list[float]:
    firsts = [(times[0] - each.sent_ns) / MS for each, times in zip(requests, told, strict=True)]
    gaps = np.concatenate([np.diff(times) for times in told]) / MS
    after = [(times[-1] - times[0]) / (len(times) - 1) / MS for times in told]
    return [
        *np.percentile(firsts, (50, 99)),
        float(np.percentile(gaps, 99)),
        float(gaps.max()),
        float(np.median(after)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=RATE_PER_S, help="requests a second")
    parser.add_argument("--seeds", type=int, default=1, help="runs, each with other requests")
    parser.add_argument("--max-num-batched-tokens", type=int, default=1536)
    parser.add_argument("--plans-in-flight", type=int, default=2)
    parser.add_argument("--scheduling-policy", default="fcfs")
    parser.add_argument("--fixed-ms", type=float, default=1.6, help="of each step")
    parser.add_argument("--least-ms", type=float, default=3.9, help="of a step's rows")
    parser.add_argument("--row-us", type=float, default=22.5, help="of each token of a step")
    parser.add_argument("--decode-us", type=float, default=35.0, help="of each sequence that decodes, beside its row")
    parser.add_argument("--to-scheduler-ms", type=float, default=3.0, help="from the client")
    parser.add_argument("--to-device-ms", type=float, default=1.5, help="of a plan")
    parser.add_argument("--to-client-ms", type=float, default=2.5, help="from the end of a step")
    options = parser.parse_args()
    times = Times(
        fixed=options.fixed_ms,
        least=options.least_ms,
        row=options.row_us / 1e3,
        decode=options.decode_us / 1e3,
        to_scheduler=options.to_scheduler_ms,
        to_device=options.to_device_ms,
        to_client=options.to_client_ms,
    )
    config = SchedulerConfig(
        scheduling_policy=options.scheduling_policy,
        plans_in_flight=options.plans_in_flight,
        max_num_batched_tokens=options.max_num_batched_tokens,
        enable_prefix_caching=False,
    )
    print("milliseconds   first token p50     p99   between tokens p99    most   for each token after the first p50")
    for seed in range(options.seeds):
        requests = arrivals(seed, options.rate)
        first, first_p99, gap_p99, gap, after = _figures(requests, run(requests, times, config))
        print(f"seed {seed:<11}{first:14.1f}{first_p99:8.1f}{gap_p99:21.1f}{gap:8.1f}{after:37.2f}", flush=True)


if __name__ == "__main__":
    main()
