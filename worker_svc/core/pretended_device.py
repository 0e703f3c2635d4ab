"""A device that is only pretended: each of its steps takes as long, and begins when the one before has ended."""

from collections.abc import Callable
from typing import NamedTuple

from contract.domain.plan import StepResult


class PendingSimulatedStep:
    """Implement `PendingStep`."""

    def __init__(
        self, result: StepResult, end_ns: int, clock_ns: Callable[[], int], sleep: Callable[[float], None]
    ) -> None:
        self._result = result
        self._end_ns = end_ns
        self._clock_ns = clock_ns
        self._sleep = sleep

    def result(self) -> StepResult:
        """Implement `PendingStep.result`: waits until the pretended device has ended the step."""
        while (left_ns := self._end_ns - self._clock_ns()) > 0:
            self._sleep(left_ns / 1e9)
        return self._result


class StepTimes(NamedTuple):
    """The times of a step, nanoseconds."""

    end_ns: int  # by the clock
    step_ns: int
    idle_ns: int  # in which the device had nothing to do before it


class PretendedDevice:
    """The steps of a device, one after the other; `sleep` takes seconds."""

    def __init__(self, step_s: float, clock_ns: Callable[[], int], sleep: Callable[[float], None]) -> None:
        """Nothing was launched yet."""
        self._step_ns = round(step_s * 1e9)
        self._clock_ns = clock_ns
        self._sleep = sleep
        self._free_ns: int | None = None

    def next_step(self) -> StepTimes:
        """The times of a step that is launched now."""
        now_ns = self._clock_ns()
        free_ns = now_ns if self._free_ns is None else self._free_ns
        start_ns = max(now_ns, free_ns)
        return StepTimes(start_ns + self._step_ns, self._step_ns, start_ns - free_ns)

    def launch(self, times: StepTimes, result: StepResult) -> PendingSimulatedStep:
        """The step of these times, which has this result."""
        self._free_ns = times.end_ns
        return PendingSimulatedStep(result, times.end_ns, self._clock_ns, self._sleep)
