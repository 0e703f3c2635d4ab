"""The end of a step, the time that the device worked on it, and the time that it had nothing to do before it."""

from collections.abc import Callable

import torch


class StepTiming:
    """The two ends of one step; on a device that runs behind the host they are its events."""

    def __init__(self, device: torch.device, clock_ns: Callable[[], int], before: "StepTiming | None") -> None:
        """The step begins on `device`, on the stream that is current there."""
        self._clock_ns = clock_ns
        # Events of torch's own, unlike those of torch.cuda, find the current stream without Python.
        self._events = [_event(device), _event(device)] if device.type == "cuda" else []
        self._times = [0, 0]
        self._before_event = before._events[1] if before is not None and before._events else None
        self._before_time = before._times[1] if before is not None else None
        self._mark(0)

    def _mark(self, which: int) -> None:
        if self._events:
            self._events[which].record()
        else:
            self._times[which] = self._clock_ns()

    def stop(self) -> None:
        """All work of the step is launched, with what it brings down."""
        self._mark(1)

    def read(self) -> tuple[int, int]:
        """Wait for the end of the step; nanoseconds (at work, idle before it)."""
        if self._events:
            self._events[1].synchronize()
            work_ms = self._events[0].elapsed_time(self._events[1])
            idle_ms = self._before_event.elapsed_time(self._events[0]) if self._before_event is not None else 0.0
            self._before_event = None
            return int(work_ms * 1e6), max(0, int(idle_ms * 1e6))
        idle_ns = self._times[0] - self._before_time if self._before_time is not None else 0
        return self._times[1] - self._times[0], max(0, idle_ns)


def _event(device: torch.device) -> torch.Event:
    return torch.Event(device, enable_timing=True)
