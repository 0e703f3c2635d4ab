"""Whether something stands still, judged by somebody who may have been stopped himself."""

import asyncio
from types import TracebackType

SUSPENDED_S = 1.0  # between two looks: the whole process did not run
_TICK_S = 1.0  # of a `RunningTimeout`, at most
_GRACE_S = 1.0  # for what is watched to go on, once the process runs again


class StallWatch:
    """Looks at a time of last progress again and again, from one thread."""

    def __init__(self, after_s: float) -> None:
        """Stalled is what made no progress for longer than `after_s`."""
        self._after_s = after_s
        self._looked_s = float("-inf")
        self._awake_s = 0.0

    def is_stalled(self, progress_s: float, now_s: float) -> bool:
        """Return whether the last progress was too long ago; the watcher must look at least once a second.

        A process that was suspended (SIGSTOP, a host that slept) has made no progress, and is not stalled for that.
        """
        if now_s - self._looked_s > SUSPENDED_S:
            self._awake_s = now_s
        self._looked_s = now_s
        return now_s - progress_s > self._after_s and now_s - self._awake_s > _GRACE_S


class RunningTimeout:
    """As `asyncio.timeout`, of seconds in which this process runs.

    They are counted in ticks: one in which the process was suspended counts as one. What has come meanwhile is taken
    before it is too late for it.
    """

    def __init__(self, seconds: float) -> None:
        self._left_s = seconds
        self._timeout = asyncio.timeout(None)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()
        self._loop = asyncio.get_running_loop()
        self._wait()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._handle.cancel()
        await self._timeout.__aexit__(kind, error, traceback)  # which raises TimeoutError if that is what it was

    def _wait(self) -> None:
        tick_s = min(_TICK_S, self._left_s)
        self._left_s -= tick_s
        self._handle = self._loop.call_later(tick_s, self._look)

    def _look(self) -> None:
        if self._left_s > 0:
            self._wait()
        else:
            self._timeout.reschedule(self._loop.time())
