"""The time to the first token of prompts that come at random times while other sequences decode, in steps.

The worker is simulated. Half a step of waiting and one of its own are due; more is what plans cost that are made too
early. Beside it stands what plans cost that are made too late: steps of the decoding sequences ÷ steps that the device
could have done. The exit status is 1 if the median is more than 2.2 steps, with the load that the flags have by
default.

    penstock bench first-token [--rate 4] [--step-ms 12] [--streams 12] [--seconds 60]
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import time

from bench.rig.first_token import hops_of
from bench.rig.machine import describe_machine
from bench.rig.services import Services
from bench.rig.step_rate import SERVICES

MAX_MODEL_LEN = 65_536
NUM_TOKENS = 4  # of each prompt's output
WARM_S = 3.0
RATE, STEP_MS, STREAMS = 4.0, 12.0, 12
MAX_STEPS = 2.2  # to the first token, in the median, of that load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=RATE, help="prompts a second")
    parser.add_argument("--step-ms", type=float, default=STEP_MS, help="device time of a step")
    parser.add_argument("--streams", type=int, default=STREAMS, help="sequences that decode all the while")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--plans-in-flight", type=int, default=2, help="plans in flight at most")
    options = parser.parse_args()
    print(describe_machine(), flush=True)
    step_s, lasts_s = options.step_ms / 1e3, WARM_S + options.seconds
    with Services(step_s, options.streams + 64, MAX_MODEL_LEN, options.plans_in_flight) as services:
        services.start(*SERVICES)
        services.wait_ready()
        port, num_steps = services.http_port, math.ceil((lasts_s + WARM_S) / step_s)
        decoding = _start("bench.rig.streams", "127.0.0.1", str(port), str(options.streams), str(num_steps))
        time.sleep(WARM_S)
        load = {"port": port, "rate": options.rate, "seconds": options.seconds, "tokens": NUM_TOKENS, "seed": 1}
        visits = [
            json.loads(line) for line in _start("bench.rig.arrivals", json.dumps(load)).communicate()[0].splitlines()
        ]
        hops = hops_of(services)
        window = json.loads(decoding.communicate()[0])
    firsts_ms = sorted(visit["first_s"] * 1e3 for visit in visits if visit["first_s"])
    if len(firsts_ms) < len(visits):
        raise SystemExit(f"{len(visits) - len(firsts_ms)} of {len(visits)} prompts had no token")
    steps = (window["end_events"] - window["begin_events"]) / options.streams
    p50, p90, p99 = statistics.median(firsts_ms), *(firsts_ms[int(len(firsts_ms) * share)] for share in (0.9, 0.99))
    has_goal = (options.rate, options.step_ms, options.streams) == (RATE, STEP_MS, STREAMS)
    goal = f", goal {MAX_STEPS:g}" if has_goal else ""
    print(
        f"{len(firsts_ms)} prompts, {options.rate:g} a second beside {options.streams} sequences, steps of "
        f"{options.step_ms:g} ms: time to the first token p50 {p50:.1f} ms ({p50 / options.step_ms:.2f} steps{goal}), "
        f"p90 {p90:.1f} ({p90 / options.step_ms:.2f}), p99 {p99:.1f} ({p99 / options.step_ms:.2f}); "
        f"steps ÷ what the device could do {steps * step_s / (window['end_s'] - window['begin_s']):.3f}"
    )
    print("hop          waits p50   p99   works p50   p99   (milliseconds, messages of the last seconds)")
    for hop in hops:
        figures = (hop.wait_p50_s, hop.wait_p99_s, hop.work_p50_s, hop.work_p99_s)
        print(f"{hop.hop:11}  " + "  ".join(f"{seconds * 1e3:7.3f}" for seconds in figures))
    if has_goal and p50 > MAX_STEPS * options.step_ms:
        raise SystemExit(f"the median is more than {MAX_STEPS:g} steps")


def _start(module: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-m", module, *arguments], stdout=subprocess.PIPE, text=True)


if __name__ == "__main__":
    main()
