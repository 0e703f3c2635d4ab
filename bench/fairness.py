"""The harm that a flood of one tenant does to another one, under the policy fair.

A simulated worker whose slots are always taken. Tenant B sends a request now and then and measures the time to its
first token: first while tenant A keeps every slot busy and lets nothing wait, then while A sends ten times as much as
can be served. The exit status is 1 if B's p95 in the flood is more than twice the other one.

    penstock bench fairness --step-ms 20 --slots 8 --seconds 60
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from bench.rig import crowd
from bench.rig.arrivals import Load, Visit
from bench.rig.chaos.pipeline import ServedPipeline
from bench.rig.machine import describe_machine
from contract.domain.api_keys import hash_api_key

MAX_RATIO = 2.0
LEAD_S = 5.0  # A comes so long before B, so that its queue is full
SHARE_B = 0.1  # of the capacity
TIMES_A = 10.0


def main() -> int:
    """Runs both phases; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each phase")
    parser.add_argument("--step-ms", type=float, default=20.0, help="device time of a step")
    parser.add_argument("--slots", type=int, default=8, help="sequences that run at once")
    parser.add_argument("--tokens", type=int, default=50, help="of each reply")
    parser.add_argument("--scheduling-policy", default="fair", help="of the scheduler: to compare with")
    options = parser.parse_args()
    print(describe_machine(), flush=True)
    with tempfile.TemporaryDirectory(prefix="penstock-fairness-") as folder:
        keys = Path(folder) / "keys"
        keys.write_text(
            "".join(json.dumps({"tenant": name, "sha256": hash_api_key(name).hex()}) + "\n" for name in ("a", "b"))
        )
        flags = [
            *(f"--step-ms={options.step_ms:g}", f"--max-num-seqs={options.slots}", "--num-blocks=4096"),
            *(
                f"--scheduling-policy={options.scheduling_policy}",
                f"--api-keys-file={keys}",
                "--max-waiting-requests-per-tenant=200",
                "--log-level=warning",
            ),
        ]
        with ServedPipeline(Path(folder) / "run", 1, flags) as pipeline:
            port = int(pipeline.gateways()[0].http_url.rpartition(":")[2])
            capacity = options.slots / (options.tokens * options.step_ms / 1e3)
            usual = _beside(pipeline, options, capacity, Load(port, 0, options.tokens, 1, streams=options.slots))
            flood = _beside(pipeline, options, capacity, Load(port, 0, options.tokens, 2, rate=TIMES_A * capacity))
    return _report(usual, flood, capacity, options)


def _beside(
    pipeline: ServedPipeline, options: argparse.Namespace, capacity: float, of_a: Load
) -> tuple[list[Visit], list[Visit]]:
    """The figures that A and B saw."""
    a = crowd.start(Load(**{**vars(of_a), "seconds": options.seconds + LEAD_S, "key": "a"}))
    time.sleep(LEAD_S)
    b = crowd.run(Load(of_a.port, options.seconds, options.tokens, 10 + of_a.seed, rate=SHARE_B * capacity, key="b"))
    seen = crowd.finish(a)
    crowd.wait_idle(pipeline, 300.0)
    return seen, b


def _report(
    usual: tuple[list[Visit], list[Visit]],
    flood: tuple[list[Visit], list[Visit]],
    capacity: float,
    options: argparse.Namespace,
) -> int:
    print(
        f"\npolicy {options.scheduling_policy}, {options.slots} slots, "
        f"steps of {options.step_ms:g} ms: {capacity:.1f} a second"
    )
    print("             A sent  let in   B sent  let in   first token of B p50   p95 (ms)")
    p95s = []
    for name, (of_a, of_b) in (("no flood", usual), ("flood", flood)):
        first_s = crowd.first_tokens_s(of_b)
        p50_s, p95_s = crowd.quantile(first_s, 0.5), crowd.quantile(first_s, 0.95)
        p95s.append(p95_s)
        counts = [len(of_a), sum(v.status == 200 for v in of_a), len(of_b), sum(v.status == 200 for v in of_b)]
        sent_a, in_a, sent_b, in_b = counts
        print(f"{name:10}  {sent_a:7} {in_a:7}  {sent_b:7} {in_b:7}  {p50_s * 1e3:20.0f} {p95_s * 1e3:5.0f}")
    ratio = p95s[1] / p95s[0]
    print(f"\np95 of B in the flood: {ratio:.2f} of what it is without (goal {MAX_RATIO:g})")
    return int(ratio > MAX_RATIO)


if __name__ == "__main__":
    sys.exit(main())
