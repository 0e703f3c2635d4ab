"""A measure of tuning that is told what it finds, and the size of the products that it is asked about."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from worker_svc.core.kernels.linear.ways import Way
from worker_svc.measure import Measured

OUTPUTS, INPUTS = 128, 512


@dataclass
class FakeMeasure:
    """Says of each way what it is told to, of others 10 us; remembers what it was asked for."""

    times: Mapping[Way, float] = field(default_factory=dict)
    spread_us: float = 0.1
    asked: list[set[Way]] = field(default_factory=list)

    def copies(self, weight_bytes: int) -> int:
        return 2

    def __call__(self, calls: Mapping[Way, Callable[[int], Tensor]], copies: int) -> dict[Way, Measured]:
        assert copies == 2
        self.asked.append(set(calls))
        return {way: Measured(self.times.get(way, 10.0), self.spread_us) for way in calls}
