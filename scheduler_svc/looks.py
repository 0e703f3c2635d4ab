"""The last look for requests before a plan that waits for its time: when it begins, and what is paused until then."""

from collections import deque

_FIRST_NS = 500_000  # before it is known how long looks take
_LEAST_NS, _MOST_NS = 300_000, 2_000_000
_SPARE_NS = 100_000
_NUM_LOOKS, _NUM_SLOW = 16, 4  # that are remembered, and of these the slowest, which are not waited for
_LONGEST_PAUSE_NS = 5_000_000


class Looks:
    """A look is one exchange with the server, in which requests are claimed. It takes longer where that is far away.

    ns  so long before a plan is due the look begins; a plan that is due sooner is made at once
    """

    def __init__(self) -> None:
        self.ns = _FIRST_NS
        self._took_ns = deque[int](maxlen=_NUM_LOOKS)

    def observe(self, took_ns: int) -> None:
        """So long after a look began, its plan could be made."""
        self._took_ns.append(took_ns)
        if len(self._took_ns) > _NUM_SLOW:
            slow_ns = sorted(self._took_ns)[-1 - _NUM_SLOW]
            self.ns = min(_MOST_NS, max(_LEAST_NS, slow_ns + _SPARE_NS))

    def is_near(self, left_ns: int, *, is_writing: bool) -> bool:
        """Return whether the look before a plan that is due after `left_ns` is to begin now; while there is something
        to write, which cannot wait, also where it would begin during that exchange.
        """
        return left_ns <= (2 * self.ns if is_writing else self.ns)

    def pause_ns(self, left_ns: int) -> int:
        """For how long nothing is read, where a plan is due after `left_ns`.

        Of a pause that leaves time for another exchange half: what came meanwhile is read the more often the sooner the
        plan is made.
        """
        until_look_ns = max(0, left_ns - self.ns)
        return until_look_ns if until_look_ns < 2 * self.ns else min(_LONGEST_PAUSE_NS, until_look_ns // 2)
