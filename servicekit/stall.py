"""Return whether something stands still, judged by somebody who may have been stopped himself."""

SUSPENDED_S = 1.0  # between two looks: the whole process did not run
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
