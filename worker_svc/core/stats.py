"""What a worker counts. One thread writes, any thread may read."""

from bisect import bisect_left
from dataclasses import dataclass, field

from penstock.domain.plan import StepResult

# Upper bounds of the step time's histogram, seconds: 100 µs to 10 s.
STEP_BOUNDS_S = (1e-4, 2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 16e-3, 32e-3, 64e-3, 0.125, 0.25, 0.5, 1.0, 2.5, 10.0)


@dataclass(slots=True)
class WorkerStats:
    """Totals since the start."""

    attention: str = ""  # whose kernels compute; empty: not loaded yet
    num_steps: int = 0
    num_tokens: int = 0  # sampled
    num_dead_letters: int = 0
    num_epochs: int = 0
    idle_s: float = 0.0  # device time between steps with nothing to do
    step_sum_s: float = 0.0
    step_counts: list[int] = field(default_factory=lambda: [0] * (len(STEP_BOUNDS_S) + 1))

    def observe(self, result: StepResult) -> None:
        """A step has ended."""
        step_s = result.step_ns * 1e-9
        self.num_steps += 1
        self.num_tokens += len(result.token_ids)
        self.idle_s += result.idle_ns * 1e-9
        self.step_sum_s += step_s
        self.step_counts[bisect_left(STEP_BOUNDS_S, step_s)] += 1
