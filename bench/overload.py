"""Ten times the load that a pipeline can serve: memory flat, 429s at once, those let in served as if nothing were.

A simulated worker, so that capacity is known. First the capacity is measured, then the time to the first token at 80 %
of it, then ten times as many requests as can be served come for a minute. The exit status is 1 if a goal is missed:
memory of no process and of Redis' data grows by more than 5 % or 8 MiB once the queue is full; the p99 of the time to
the first token of those let in is at most twice that at 80 % load; the p99 of the time to a 429 is at most 50 ms.

    penstock bench overload --step-ms 20 --slots 8 --seconds 60
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from bench.rig import crowd
from bench.rig.arrivals import Load, Visit
from bench.rig.chaos.pipeline import ServedPipeline
from bench.rig.machine import describe_machine

SETTLED_S = 10.0  # of overload, after which the queue is full and memory is to stay as it is
MAX_RATIO = 2.0
MAX_REFUSAL_S = 0.05
MAX_GROWTH, MAX_GROWTH_MIB = 0.05, 8.0


def main() -> int:
    """Runs the three phases; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each phase")
    parser.add_argument("--times", type=float, default=10.0, help="load, in multiples of the capacity")
    parser.add_argument("--step-ms", type=float, default=20.0, help="device time of a step")
    parser.add_argument("--slots", type=int, default=8, help="sequences that run at once")
    parser.add_argument("--tokens", type=int, default=50, help="of each reply")
    parser.add_argument(
        "--max-waiting-requests", type=int, default=0, help="bound on the queue; 0: as many as there are slots"
    )
    parser.add_argument("--log", type=Path, help="keeps what the services write, in this file")
    options = parser.parse_args()
    bound = options.max_waiting_requests or options.slots
    flags = [
        *(f"--step-ms={options.step_ms:g}", f"--max-num-seqs={options.slots}", f"--max-waiting-requests={bound}"),
        *("--num-blocks=4096", "--log-level=warning"),
    ]
    print(describe_machine(), flush=True)
    with tempfile.TemporaryDirectory(prefix="penstock-overload-") as folder:
        try:
            with ServedPipeline(Path(folder) / "run", 1, flags) as pipeline:
                return _measure(pipeline, options, bound)
        finally:
            if options.log:
                options.log.write_bytes((Path(folder) / "run" / "err").read_bytes())


def _measure(pipeline: ServedPipeline, options: argparse.Namespace, bound: int) -> int:
    port = int(pipeline.gateways()[0].http_url.rpartition(":")[2])
    began_s = time.monotonic()
    busy = crowd.run(Load(port, options.seconds / 3, options.tokens, seed=1, streams=options.slots + bound // 2))
    capacity = sum(bool(visit.ended_s) for visit in busy) / (time.monotonic() - began_s)
    crowd.wait_idle(pipeline)
    usual = crowd.run(Load(port, options.seconds, options.tokens, seed=2, rate=0.8 * capacity))
    crowd.wait_idle(pipeline)
    print(f"\ncapacity {capacity:.1f} requests/s: {options.slots} slots, steps of {options.step_ms:g} ms", flush=True)
    clients = crowd.start(Load(port, options.seconds, options.tokens, seed=3, rate=options.times * capacity))
    samples: list[tuple[float, dict[str, float]]] = []
    began_s = time.monotonic()
    while clients.poll() is None and (now_s := time.monotonic() - began_s) < options.seconds:
        samples.append((now_s, crowd.memory_mib(pipeline)))
        time.sleep(1.0)
    return _report(usual, crowd.finish(clients), samples, options)


def _report(
    usual: list[Visit], visits: list[Visit], samples: list[tuple[float, dict[str, float]]], options: argparse.Namespace
) -> int:
    refused = [visit for visit in visits if visit.status == 429]
    admitted = [visit for visit in visits if visit.status == 200]
    others = len(visits) - len(refused) - len(admitted) + sum(not visit.ended_s for visit in admitted)
    usual_s, first_s = (crowd.quantile(crowd.first_tokens_s(each), 0.99) for each in (usual, admitted))
    refusal_s = crowd.quantile([visit.answered_s for visit in refused], 0.99)
    ratio = first_s / usual_s
    usual_refused = sum(visit.status == 429 for visit in usual)
    print(f"80 % load    {len(usual)} requests, {usual_refused} refused; first token p99 {usual_s * 1e3:.0f} ms")
    print(
        f"{options.times:g}x load     {len(visits)} requests in {options.seconds:g} s: {len(admitted)} let in, "
        f"{len(refused)} refused, {others} failed"
    )
    print(f"             first token p99 {first_s * 1e3:.0f} ms, {ratio:.2f} of that at 80 % (goal {MAX_RATIO:g})")
    print(f"             429 p99 {refusal_s * 1e3:.1f} ms (goal {MAX_REFUSAL_S * 1e3:g})")
    print(f"memory       MiB after {SETTLED_S:g} s, at the end, most between (goal: + {MAX_GROWTH:.0%} or 8 MiB)")
    settled = [memory for now_s, memory in samples if now_s >= SETTLED_S]
    is_flat = True
    for name in settled[0]:
        first, last, most = settled[0][name], settled[-1][name], max(memory[name] for memory in settled)
        flat = last - first <= max(MAX_GROWTH * first, MAX_GROWTH_MIB)
        is_flat &= flat
        print(f"  {name:15} {first:8.1f} {last:8.1f} {most:8.1f}{'' if flat else '  grows'}")
    return int(not (is_flat and ratio <= MAX_RATIO and refusal_s <= MAX_REFUSAL_S and not others))


if __name__ == "__main__":
    sys.exit(main())
