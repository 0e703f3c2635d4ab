"""The table of `bench.gpu`: rates, and the ratios that matter."""

from collections.abc import Sequence

from bench.rig.drawn_shapes import find_shape
from bench.rig.engines import Measured
from bench.rig.work import Ceilings, Work, floor_s

# Of the pipeline: what it must reach of the peer's rate, and of the one process's.
PEER_GOALS = {
    "0.6b": {"decode1": 2.2, "decode32": 1.5, "decode256": 1.2, "prefill": 1.1, "nano": 1.15},
    "8b": {"decode1": 1.3, "decode32": 1.15, "decode256": 1.1, "prefill": 1.0, "nano": 1.12},
    "8b-fp8": {"decode1": 1.6, "decode32": 1.4, "decode256": 1.15, "prefill": 1.1},
    "8b-fp8-kv": {"deep": 1.2},
    "30b-a3b": {"decode1": 1.9, "decode32": 1.2, "decode256": 1.08, "prefill": 1.2},
    "gemma-4b": {"decode1": 1.3, "decode32": 1.15, "decode256": 1.1},
    "v2-lite": {"decode1": 1.3, "decode32": 1.15, "decode256": 1.1},
    "v32k": {"served": 1.15},
}
# Of requests that come at times: the share of the peer's that the pipeline may take at most.
LATENCY_GOALS = {"ttft_ms": 0.9, "ttft_p99_ms": 0.9, "tpot_ms": 0.9, "itl_p99_ms": 1.0}
_LATENCIES = {
    "ttft_ms": "TTFT p50",
    "ttft_p99_ms": "TTFT p99",
    "itl_ms": "ITL p50",
    "itl_p99_ms": "ITL p99",
    "tpot_ms": "TPOT p50",
    "tpot_p99_ms": "TPOT p99",
}
PROCESS_GOALS = {
    **dict.fromkeys(("decode1", "decode8", "decode32", "decode128", "decode256", "deep", "nano"), 0.97),
    **dict.fromkeys(("prefill", "long", "contexts", "embed"), 0.95),
}
EMBED_GOAL = 0.97  # of the rate of the row `prefill`, on the same engine
_TITLES = ("floor", "process", "pipeline", "peer", "÷ process (goal)", "÷ peer (goal)", "÷ floor")


def header() -> str:
    """Over the rows; rates are tokens per second."""
    floor, process, pipeline, peer, *ratios = _TITLES
    rates = "".join(f"{title:>11}" for title in (floor, process, pipeline, peer))
    return f"{'model':8} {'row':9}{rates}" + "".join(f"  {title:>16}" for title in ratios)


def row_line(model: str, work: Work, found: dict[str, Measured], ceilings: Ceilings | None) -> str:
    """One row: tokens per second, and of the pipeline its ratio to each."""
    floor = work.counted_tokens / floor_s(find_shape(model), work, ceilings) if ceilings else None
    process, pipeline, peer = (_rate(found.get(engine), work) for engine in ("process", "pipeline", "peer"))
    rates = "".join(_shown(rate, "11,.0f") for rate in (floor, process, pipeline, peer))
    ratios = (
        _ratio(pipeline, process, PROCESS_GOALS.get(work.name)),
        _ratio(pipeline, peer, PEER_GOALS.get(model, {}).get(work.name)),
        _ratio(pipeline, floor, None),
    )
    return f"{model:8} {work.name:9}{rates}" + "".join(f"  {ratio:>16}" for ratio in ratios)


def latency_lines(model: str, work: Work, found: dict[str, Measured]) -> list[str]:
    """Of requests that come at times: what clients waited, milliseconds, and the share of what the peer's did."""
    if work.arrivals_s is None:
        return []
    pipeline, peer = (found[name].loads.get(work.name) if name in found else None for name in ("pipeline", "peer"))
    lines = []
    for name, title in _LATENCIES.items():
        ours, theirs = (getattr(load, name) if load is not None else None for load in (pipeline, peer))
        shown = f"{_shown(ours, '11.2f')}{_shown(theirs, '11.2f')}  {_ratio(ours, theirs, LATENCY_GOALS.get(name))}"
        lines.append(f"{model:8} {work.name:9} {title:9} pipeline, peer, ÷ peer (at most): {shown}")
    return lines


def embed_lines(model: str, works: Sequence[Work], found: dict[str, Measured]) -> list[str]:
    """The rate of vectors as a share of that of prompts which are answered with one token, for each engine."""
    by_row = {work.name: work for work in works}
    if not {"embed", "prefill"} <= by_row.keys():
        return []
    lines = []
    for engine in ("process", "pipeline"):
        embed, prefill = (_rate(found.get(engine), by_row[row]) for row in ("embed", "prefill"))
        lines.append(f"{model:8} embed ÷ prefill (goal), {engine}: {_ratio(embed, prefill, EMBED_GOAL)}")
    return lines


def notes(found: dict[str, Measured]) -> list[str]:
    """All else that was seen: starts, latencies, profiles."""
    lines = []
    for measured in found.values():
        phases = measured.start.get("phases") or {}
        more = "".join(f"; {name}: {value}" for name, value in phases.items())
        before = "".join(
            f", {name[:-2]} {measured.start[name]:.1f} s"
            for name in ("imported_s", "ready_s")
            if name in measured.start
        )
        lines.append(f"start, {measured.name}: first token {measured.start['first_s']:.1f} s{before}{more}")
        for row, rounds in measured.rounds.items():
            lines.append(f"{row}, {measured.name}: rounds of {', '.join(f'{seconds:.4f}' for seconds in rounds)} s")
        for row, load in measured.loads.items():
            lines.append(
                f"{row}, {measured.name}: time to first token {load.ttft_ms:.2f} ms, "
                f"{load.tpot_ms:.3f} ms a token after it (medians)"
            )
        lines += [f"{measured.name}: {line}" for line in measured.notes]
    return lines


def _rate(measured: Measured | None, work: Work) -> float | None:
    seconds = work.seconds(measured.rounds) if measured else None
    return work.counted_tokens / seconds if seconds else None


def _ratio(rate: float | None, other: float | None, goal: float | None) -> str:
    if rate is None or not other:
        return "–"
    return f"{rate / other:.3f}" + (f" ({goal:g})" if goal else "")


def _shown(value: float | None, form: str) -> str:
    return format(value, form) if value is not None else f"{'–':>11}"
