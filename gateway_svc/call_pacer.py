"""Lets a burst of calls in one by one, so that what the first of them send is on its way while the others are read."""

import asyncio
from collections import deque

AT_ONCE = 4  # calls that are read between two looks at the sockets


class CallPacer:
    """For one event loop, which writes to its sockets at the end of a turn: hundreds of calls that come at once would
    all be read before the first of them is sent.
    """

    def __init__(self, at_once: int = AT_ONCE) -> None:
        """Lets `at_once` through in a turn of the loop."""
        self._at_once = at_once
        self._left = at_once  # in this turn
        self._is_turning = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> None:
        """Waits for a turn of the loop in which there is room, after those who came before."""
        if not self._is_turning:
            self._is_turning = True
            asyncio.get_running_loop().call_soon(self._turn)
        if self._left and not self._waiting:
            self._left -= 1
            return
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        await waiting

    def _turn(self) -> None:
        self._left = self._at_once
        while self._waiting and self._left:
            first = self._waiting.popleft()
            if not first.done():  # else its call was given up
                first.set_result(None)
                self._left -= 1
        self._is_turning = bool(self._waiting) or self._left < self._at_once
        if self._is_turning:
            asyncio.get_running_loop().call_soon(self._turn)
