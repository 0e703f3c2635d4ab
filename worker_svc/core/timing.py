"""When a step is done, how long the device worked on it, and how long it had nothing to do before it."""

from collections.abc import Callable

import torch


class StepTiming:
    """The two ends of one step; on a device that runs behind the host they are its events."""

    def __init__(
        self, stream: "torch.cuda.Stream | None", clock_ns: Callable[[], int], before: "StepTiming | None"
    ) -> None:
        """The step begins on `stream`; None: on the CPU."""
        self._stream = stream  # to look up the current one takes longer than all else here
        self._clock_ns = clock_ns
        self._events = [_event(), _event()] if stream is not None else []
        self._times = [0, 0]
        self._before_event = before._events[1] if before is not None and stream is not None else None
        self._before_time = before._times[1] if before is not None else None
        self._mark(0)

    def _mark(self, which: int) -> None:
        if self._stream is not None:
            self._events[which].record(self._stream)
        else:
            self._times[which] = self._clock_ns()

    def stop(self) -> None:
        """All work of the step is launched, with what it brings down."""
        self._mark(1)

    def read(self) -> tuple[int, int]:
        """Wait for the end of the step; nanoseconds (at work, idle before it)."""
        if self._stream is not None:
            self._events[1].synchronize()
            work_ms = self._events[0].elapsed_time(self._events[1])
            idle_ms = self._before_event.elapsed_time(self._events[0]) if self._before_event is not None else 0.0
            self._before_event = None
            return int(work_ms * 1e6), max(0, int(idle_ms * 1e6))
        idle_ns = self._times[0] - self._before_time if self._before_time is not None else 0
        return self._times[1] - self._times[0], max(0, idle_ns)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
