"""Says the same again only now and then: what lasts long is told, and does not fill the log."""

import time

REMIND_S = 10.0


class Reminder:
    """Once in ten seconds."""

    def __init__(self, period_s: float = REMIND_S) -> None:
        self._period_s = period_s
        self._told_s = float("-inf")

    def is_due(self, now_s: float | None = None) -> bool:
        """Return whether it is to be said now; the next time is a period later.

        Args:
            now_s: a clock that never goes back, in seconds; None: `time.monotonic`.
        """
        now_s = time.monotonic() if now_s is None else now_s
        if now_s - self._told_s < self._period_s:
            return False
        self._told_s = now_s
        return True
