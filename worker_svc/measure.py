"""The measure of tuning: the time that a call takes on a CUDA device, beside others'."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

W = TypeVar("W")

_CALLS = 8  # of a graph, at least; each copy of the weight is read in turn
_ROUNDS = 25
_WARM_UPS = 3
_CACHES = 3  # as many bytes of weights are read in turn as so many second-level caches hold


@dataclass(frozen=True, slots=True)
class Measured:
    """Of a call, in microseconds."""

    median_us: float
    spread_us: float  # between the quartiles


class Measure(Protocol):
    """Measures calls, of which each is told which copy of the weight it is to read."""

    def copies(self, weight_bytes: int) -> int:
        """The copies of a weight of so many bytes that calls read in turn, so that no cache holds what they read."""

    def __call__(self, calls: Mapping[W, Callable[[int], object]], copies: int) -> dict[W, Measured]:
        """The time of each; calls that cannot be measured are left out."""


class GraphMeasure:
    """Implement `Measure`: each call is recorded many times as a graph; rounds go through all graphs in turn, so that
    whatever changes meanwhile, clocks above all, changes for all.
    """

    def __init__(self, device: torch.device) -> None:
        self._cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size

    def copies(self, weight_bytes: int) -> int:
        """Implement `Measure.copies`."""
        return max(2, -(-_CACHES * self._cache_bytes // weight_bytes))

    def __call__(self, calls: Mapping[W, Callable[[int], object]], copies: int) -> dict[W, Measured]:
        """Implement `Measure.__call__`."""
        num_calls = -(-_CALLS // copies) * copies
        # One pool for all: they are replayed one by one, and nobody reads what comes out.
        pool = torch.cuda.graph_pool_handle()
        graphs = {each: self._record(call, copies, num_calls, pool) for each, call in calls.items()}
        times: dict[W, list[float]] = {each: [] for each in graphs}
        for number in range(_WARM_UPS + _ROUNDS):
            for each, graph in graphs.items():
                elapsed_us = self._replay(graph) / num_calls
                if number >= _WARM_UPS:
                    times[each].append(elapsed_us)
        return {each: summarize(measured) for each, measured in times.items()}

    def _record(self, call: Callable[[int], object], copies: int, num_calls: int, pool: Any) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            for number in range(num_calls):
                call(number % copies)
        return graph

    def _replay(self, graph: torch.cuda.CUDAGraph) -> float:
        """Microseconds."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3


def summarize(times: Iterable[float]) -> Measured:
    """Of all rounds."""
    first, median, third = torch.tensor(list(times), dtype=torch.float64).quantile(
        torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    )
    return Measured(float(median), float(third - first))
