"""The pipeline against the same cores in one overlapped loop: steps per second, and the time to the first token.

The worker is simulated, two plans are in flight, all sequences decode. Each figure is the median over rounds in which
loop and pipeline take turns. CPU is what each process used for one step, in microseconds.

    two-core     scheduler and worker as processes over an embedded server, the token log written
    full         all five services, streaming to a client over HTTP; wants 16 cores. One gateway, or two that
                 write more than 50,000 events a second
    first-token  what an idle pipeline adds to the time to the first token, and where; wants 16 cores

    python -m bench.pipeline [--mode two-core] [--rounds 3]

With --against, two-core alone, in this checkout and in that of another commit, turn by turn:

    git worktree add ../before COMMIT; python -m bench.pipeline --against ../before
"""

import argparse
import statistics
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.rig.checkpoint import write_checkpoint
from bench.rig.first_token import hops_of, measure_engine, measure_http
from bench.rig.loop import WINDOW, measure_loop
from bench.rig.machine import describe_machine, num_cores
from bench.rig.services import Services
from bench.rig.step_rate import SERVICES, measure_bus, measure_pipeline
from bench.rig.two_trees import alternate, line

MODES = ("two-core", "full", "first-token")
FULL_CORES = 16
FIRST_TOKEN_STEP_S = 0.002
NUM_REQUESTS = 200
HERE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Case:
    """A load, and the share of the loop's rate that the pipeline is to reach."""

    num_seqs: int
    step_s: float
    target: float
    num_gateways: int = 1  # one for each 50,000 events a second that it has to write, or more

    @property
    def num_steps(self) -> int:
        """Steps of one run: some seconds, and contexts short enough that reading them costs the same all along."""
        return max(500, min(8000, int(4.0 / self.step_s)))


CASES = {
    "two-core": (Case(256, 0.002, 0.97), Case(256, 0.008, 0.97)),
    "full": (Case(256, 0.008, 0.97), Case(32, 0.002, 0.97), Case(1, 0.0005, 0.95), Case(32, 0.0005, 0.95, 2)),
}


def compare(mode: str, case: Case, rounds: int) -> str:
    """One line of the table."""
    loops, rates = [], []
    for _ in range(rounds):
        loops.append(measure_loop(case.num_seqs, case.step_s, case.num_steps))
        load = (case.step_s, case.num_seqs, case.num_steps, WINDOW)
        rates.append(measure_bus(*load) if mode == "two-core" else measure_pipeline(*load, case.num_gateways))
    pipelines = [rate.steps_per_s for rate in rates]
    loop, pipeline = statistics.median(loops), statistics.median(pipelines)
    cpu = ", ".join(f"{kind} {statistics.median(rate.cpu_us[kind] for rate in rates):.0f}" for kind in rates[0].cpu_us)
    return (
        f"{mode:11}  {case.num_seqs:4}  {case.step_s * 1e3:5.1f}  {loop:8.1f}  {pipeline:8.1f}  {pipeline / loop:5.3f}"
        f"  {min(pipelines) / loop:5.3f}–{max(pipelines) / loop:5.3f}  {case.target:4.2f}  {cpu}"
    )


def first_token() -> str:
    """The figure and its parts."""
    with TemporaryDirectory() as folder:
        write_checkpoint(Path(folder))
        alone_s = measure_engine(Path(folder), FIRST_TOKEN_STEP_S, NUM_REQUESTS)
    with Services(FIRST_TOKEN_STEP_S, 32, 1024, WINDOW) as services:
        services.start(*SERVICES)
        services.wait_ready()
        measure_http(services.http_port, NUM_REQUESTS // 4)
        through_s = measure_http(services.http_port, NUM_REQUESTS)
        hops = hops_of(services)
    alone_ms, through_ms = (statistics.median(times) * 1e3 for times in (alone_s, through_s))
    p99_ms = sorted(through_s)[len(through_s) * 99 // 100] * 1e3
    lines = [
        f"time to the first token, one request at a time, steps of {FIRST_TOKEN_STEP_S * 1e3:g} ms, median of "
        f"{NUM_REQUESTS}: one process {alone_ms:.2f} ms, pipeline {through_ms:.2f} ms (p99 {p99_ms:.2f}), "
        f"added {through_ms - alone_ms:.2f} ms (target: at most 3)",
        "hop          waits p50   p99   works p50   p99   (milliseconds, messages of the last seconds)",
    ]
    for hop in hops:
        figures = (hop.wait_p50_s, hop.wait_p99_s, hop.work_p50_s, hop.work_p99_s)
        lines.append(f"{hop.hop:11}  " + "  ".join(f"{seconds * 1e3:7.3f}" for seconds in figures))
    return "\n".join(lines)


def compare_trees(other: Path, rounds: int, seconds: float) -> None:
    """The case that leaves least time for the way to the worker and back, of another checkout and of this one."""
    case = min(CASES["two-core"], key=lambda each: each.step_s)
    num_steps = int(seconds / case.step_s)
    print(f"\n{case.num_seqs} sequences, steps of {case.step_s * 1e3:g} ms, {num_steps} of them a round")
    load = (case.num_seqs, num_steps, case.step_s)
    both = alternate((other, HERE), rounds, *load, say=lambda text: print(text, flush=True))
    print("checkout        loop/s    pipeline/s  ratio  rounds       CPU µs a step", flush=True)
    for name, turns in zip((other.name, "this"), both, strict=True):
        print(line(name, turns), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=MODES, action="append", help=f"again for more; default: all, on {FULL_CORES}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--against", type=Path, help="a checkout of another commit, to be compared with this one")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each loop, with --against")
    options = parser.parse_args()
    if options.against is not None:
        print(describe_machine(), flush=True)
        compare_trees(options.against.resolve(), options.rounds, options.seconds)
        return
    modes = options.mode or (MODES if num_cores() >= FULL_CORES else MODES[:1])
    print(describe_machine(), flush=True)
    compared = [mode for mode in modes if mode in CASES]
    if compared:
        print("\nmode         seqs  ms     loop/s    pipeline/s  ratio  rounds       goal  CPU µs a step")
    for mode in compared:
        for case in CASES[mode]:
            print(compare(mode, case, options.rounds), flush=True)
    if "first-token" in modes:
        print("\n" + first_token())
    if modes == MODES[:1] and not options.mode:
        print(f"\nthe other modes want {FULL_CORES} cores; --mode runs them anyway")


if __name__ == "__main__":
    main()
