"""The figures of a run: what vLLM's benchmark tells, under its names."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from contract.domain.errors import invalid
from penstock.benchmark.stream import Outcome

# Times of a request, by the names that flags have.
METRICS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
GOODPUT_METRICS = ("ttft", "tpot", "e2el")  # that one request has one of


@dataclass(frozen=True, slots=True)
class Times:
    """The times of one request that ended well, milliseconds."""

    ttft: float
    tpot: float | None  # None: it has one token
    itl: list[float]  # between two events with output
    e2el: float

    @classmethod
    def of(cls, outcome: Outcome) -> "Times":
        """Of a request; one without any output had its first token when it ended."""
        first_s = outcome.told_s[0] if outcome.told_s else outcome.ended_s
        others = outcome.output_tokens - 1
        gaps = np.diff(outcome.told_s) * 1e3
        return cls(
            ttft=(first_s - outcome.sent_s) * 1e3,
            tpot=(outcome.ended_s - first_s) * 1e3 / others if others > 0 else None,
            itl=[float(gap) for gap in gaps],
            e2el=(outcome.ended_s - outcome.sent_s) * 1e3,
        )

    def keeps(self, bounds: Mapping[str, float]) -> bool:
        """Return whether each time is within its bound; one that it has not is."""
        return all((getattr(self, name) or 0.0) <= bound for name, bound in bounds.items())


def parse_goodput(words: Iterable[str]) -> dict[str, float]:
    """Bounds such as `ttft:200`, milliseconds, by metric.

    Raises:
        PenstockError: INVALID_ARGUMENT: one is none of these.
    """
    bounds = {}
    for word in words:
        name, _, bound = word.partition(":")
        try:
            bounds[name] = float(bound)
        except ValueError:
            name = ""
        if name not in GOODPUT_METRICS:
            known = ", ".join(GOODPUT_METRICS)
            raise invalid(f"--goodput takes NAME:MILLISECONDS with a name of {known}, got {word!r:.80}", "goodput")
    return bounds


def figures(outcomes: Sequence[Outcome], percentiles: Sequence[float], bounds: Mapping[str, float]) -> dict[str, Any]:
    """The figures of a run.

    Args:
        outcomes: of all requests.
        percentiles: 0 to 100, of each metric.
        bounds: of a request that counts for the goodput, milliseconds by metric; none: there is no goodput.
    """
    good = [each for each in outcomes if not each.error]
    times = [Times.of(each) for each in good]
    begin_s, end_s = min((o.sent_s for o in outcomes), default=0.0), max((o.ended_s for o in outcomes), default=0.0)
    duration_s = max(end_s - begin_s, 1e-9)
    prompt_tokens, output_tokens = sum(o.prompt_tokens for o in good), sum(o.output_tokens for o in good)
    told: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "total_input_tokens": prompt_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": len(good) / duration_s,
        "request_goodput": sum(each.keeps(bounds) for each in times) / duration_s if bounds else None,
        "output_throughput": output_tokens / duration_s,
        "total_token_throughput": (prompt_tokens + output_tokens) / duration_s,
        "max_concurrent_requests": _most_at_once(outcomes),
    }
    for name in METRICS:
        told |= _spread(name, _values(name, times), percentiles)
    return told


def _values(name: str, times: Sequence[Times]) -> list[float]:
    if name == "itl":
        return [gap for each in times for gap in each.itl]
    return [value for each in times if (value := getattr(each, name)) is not None]


def _spread(name: str, values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float | None]:
    if not values:
        empty = [f"mean_{name}_ms", f"median_{name}_ms", f"std_{name}_ms"]
        return dict.fromkeys([*empty, *(f"p{each:g}_{name}_ms" for each in percentiles)])
    return {
        f"mean_{name}_ms": float(np.mean(values)),
        f"median_{name}_ms": float(np.median(values)),
        f"std_{name}_ms": float(np.std(values)),
        **{f"p{each:g}_{name}_ms": float(np.percentile(values, each)) for each in percentiles},
    }


def changes(outcomes: Sequence[Outcome]) -> list[tuple[float, int]]:
    """The times at which requests begin (1) and end (-1), in order."""
    return sorted([(each.sent_s, 1) for each in outcomes] + [(each.ended_s, -1) for each in outcomes])


def _most_at_once(outcomes: Sequence[Outcome]) -> int:
    return int(np.cumsum([change for _, change in changes(outcomes)]).max(initial=0))
