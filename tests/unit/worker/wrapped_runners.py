"""The simulated runner with errors, or with steps that end when a test says so."""

import threading
from dataclasses import dataclass, field

from played_scheduler import TIMEOUT_S

from contract.domain.plan import StepPlan
from worker_svc.core.interface import PendingStep, Runner


@dataclass
class Failing:
    """The simulated runner with an error in one launch or one result."""

    inner: Runner
    launch_error: Exception | None = None
    result_error: Exception | None = None
    at_step: int = 3

    @property
    def limits(self):
        return self.inner.limits

    def launch(self, plan: StepPlan) -> PendingStep:
        if plan.step == self.at_step and self.launch_error is not None:
            error, self.launch_error = self.launch_error, None
            raise error
        pending = self.inner.launch(plan)
        return _FailingStep(self.result_error) if plan.step == self.at_step and self.result_error else pending

    def close(self) -> None:
        self.inner.close()


@dataclass
class _FailingStep:
    error: Exception

    def result(self):
        raise self.error


@dataclass
class Held:
    """The simulated runner whose steps end when the test says so."""

    inner: Runner
    released: threading.Event = field(default_factory=threading.Event)
    num_launched: int = 0

    @property
    def limits(self):
        return self.inner.limits

    def launch(self, plan: StepPlan) -> PendingStep:
        self.num_launched += 1
        return _HeldStep(self.inner.launch(plan), self.released)

    def close(self) -> None:
        self.inner.close()


@dataclass
class _HeldStep:
    inner: PendingStep
    released: threading.Event

    def result(self):
        assert self.released.wait(TIMEOUT_S)
        return self.inner.result()
