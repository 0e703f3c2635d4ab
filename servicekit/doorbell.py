"""Keeps idle services from sleeping while a request is on its way to them, and for a while after it.

Waking a core that sleeps, and what it does slowly at first, takes longer than all the work that the pipeline does for
a request. So an idle gateway rings when a call comes in, before it looks at it; who has nothing to do hears it in the
read that it waits in anyway, and for some time waits without sleeping. Who is busy does not listen: it wakes often
enough. Who has more than a few requests sleeps whenever it can: its core's other half may be the one that launches
kernels. Nothing depends on a ring.
"""

import time
from collections.abc import Callable, Mapping

from servicekit.bus import keys
from servicekit.bus.calls import Append, Entry
from servicekit.bus.keys import Keys

FEW = 4  # requests at once, for which nobody sleeps


class Doorbell:
    """One service's; used by one thread."""

    def __init__(
        self,
        names: Keys,
        awake_s: float,
        clock_s: Callable[[], float] = time.monotonic,
        *,
        is_for_all: bool = True,
    ) -> None:
        """It has not rung.

        Args:
            names: of the pool.
            awake_s: how long a ring is good for, seconds; 0: it is not listened to.
            clock_s: a clock that never goes back, in seconds.
            is_for_all: whoever rang; else only this one's own rings count: the next request comes to one gateway.
        """
        self._stream = names.bell
        self._awake_s = awake_s
        self._clock_s = clock_s
        self._is_for_all = is_for_all
        self._position = b"0-0"
        self._rang_until_s = 0.0  # its own ring
        self._until_s = 0.0

    def ring(self) -> Append | None:
        """The calls to send when a request comes, so that everybody wakes at once."""
        if not self._awake_s:
            return None
        self._rang_until_s = self._clock_s() + self._awake_s
        return Append(self._stream, {keys.SENT_NS: b"%d" % time.time_ns()}, keys.BELL_CAP)

    def listen(self, *, is_idle: bool) -> dict[bytes, bytes]:
        """The stream to read, and after which entry; empty for who is busy."""
        return {self._stream: self._position} if is_idle and self._awake_s else {}

    def hear(self, entries: Mapping[bytes, list[Entry]]) -> None:
        """Take in what a read has brought."""
        if rings := entries.get(self._stream):
            self._position = rings[-1].entry_id
            now_s = self._clock_s()
            if self._is_for_all or now_s < self._rang_until_s:
                self._until_s = now_s + self._awake_s

    def awake_s(self, num_requests: int = 0) -> float:
        """For how long who has so many requests in hand does not sleep, seconds."""
        if num_requests > FEW:
            self._until_s = 0.0
        return max(0.0, self._until_s - self._clock_s()) if self._until_s else 0.0
