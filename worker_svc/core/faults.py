"""Fault injection: a runner that kills its process, or a device that hangs, over tokens that a test has chosen."""

from collections.abc import Callable
from dataclasses import dataclass

from contract.domain.plan import StepPlan, StepResult
from worker_svc.core.interface import Limits, PendingStep, Runner

_NAP_S = 0.1


@dataclass(frozen=True, slots=True)
class Faults:
    """The tokens that do something, as soon as a prompt has one or a step makes it; None: no token does."""

    die_on_token: int | None = None
    hang_on_token: int | None = None

    def __bool__(self) -> bool:
        return self.die_on_token is not None or self.hang_on_token is not None


class FaultyRunner:
    """Implement `Runner`: the given one, until a fault strikes."""

    def __init__(self, runner: Runner, faults: Faults, die: Callable[[], None], sleep: Callable[[float], None]) -> None:
        """`die` ends the process without a word; `sleep` takes seconds."""
        self._runner = runner
        self._faults = faults
        self._die = die
        self._sleep = sleep

    @property
    def limits(self) -> Limits:
        """Implement `Runner.limits`."""
        return self._runner.limits

    def launch(self, plan: StepPlan) -> PendingStep:
        """Implement `Runner.launch`."""
        admitted = {token_id for admission in plan.admissions for token_id in admission.token_ids.tolist()}
        if self._faults.die_on_token in admitted:
            self._die()
        return _FaultyStep(self._runner.launch(plan), self, hangs=self._faults.hang_on_token in admitted)

    def close(self) -> None:
        """Implement `Runner.close`."""
        self._runner.close()

    def strike(self, result: StepResult) -> StepResult:
        """The result of a step, if it has one."""
        made = set(result.token_ids.tolist())
        if self._faults.die_on_token in made:
            self._die()
        if self._faults.hang_on_token in made:
            self.hang()
        return result

    def hang(self) -> None:
        """Never returns."""
        while True:
            self._sleep(_NAP_S)


@dataclass(frozen=True, slots=True)
class _FaultyStep:
    """Implement `PendingStep`."""

    step: PendingStep
    runner: FaultyRunner
    hangs: bool

    def result(self) -> StepResult:
        """Implement `PendingStep.result`."""
        if self.hangs:
            self.runner.hang()
        return self.runner.strike(self.step.result())
