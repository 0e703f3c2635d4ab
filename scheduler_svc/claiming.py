"""The times at which requests are claimed."""

CLAIM_COUNT = 16  # requests of one turn: each takes a tenth of a millisecond and more, for which plans wait
ASK_AGAIN_NS = 50_000_000  # a pool that settles
SWEEP_NS = 1_000_000_000  # a hint may be lost: claim once in a while without one


class Claiming:
    """The next claim; times are monotonic nanoseconds."""

    def __init__(self) -> None:
        self.is_due = True  # a hint was read, or there may be more than the last claim brought
        self._sweep_ns = 0

    def sweeps(self, now_ns: int) -> bool:
        """Return whether it is time to claim without a hint."""
        if now_ns < self._sweep_ns:
            return False
        self._sweep_ns = now_ns + SWEEP_NS
        self.is_due = True
        return True

    def settles(self, now_ns: int) -> None:
        """The pool had no answer yet."""
        self._sweep_ns = now_ns + ASK_AGAIN_NS
