"""Counts of a worker. One thread writes, any thread may read."""

from dataclasses import dataclass, field

from contract.domain.histogram import Histogram
from contract.domain.plan import StepResult

# Upper bounds of the step time's histogram, seconds: 100 µs to 10 s.
STEP_BOUNDS_S = (1e-4, 2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 16e-3, 32e-3, 64e-3, 0.125, 0.25, 0.5, 1.0, 2.5, 10.0)


@dataclass(slots=True)
class ExecutionStats:
    """Totals since the start."""

    attention: str = ""  # whose kernels compute; empty: not loaded yet
    num_steps: int = 0
    num_tokens: int = 0  # sampled
    num_dead_letters: int = 0
    num_pairings: int = 0  # with schedulers
    idle_s: float = 0.0  # device time between steps with nothing to do
    step: Histogram = field(default_factory=lambda: Histogram(STEP_BOUNDS_S))  # device time, seconds

    def observe(self, result: StepResult) -> None:
        """A step has ended."""
        step_s = result.step_ns * 1e-9
        self.num_steps += 1
        self.num_tokens += len(result.token_ids)
        self.idle_s += result.idle_ns * 1e-9
        self.step.observe(step_s)
