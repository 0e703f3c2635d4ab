"""The gateway's hold on the bus: its session, its two connections, and what it does when the server goes away."""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import structlog

from contract.domain.errors import PenstockError
from servicekit.bus.calls import Call, DropStream, Entry, Greeting, Hello, Leave, Read, Renew, Revalidate, SessionKind
from servicekit.bus.interface import AsyncConnection, Bus, BusFull, BusUnavailable
from servicekit.doorbell import Doorbell
from servicekit.pool_stats import Loss, PoolStats
from servicekit.reminder import Reminder
from servicekit.roster import Roster
from servicekit.session import RENEWALS
from servicekit.shape import Shape
from servicekit.stall import RunningTimeout
from servicekit.status import is_draining

R = TypeVar("R")

ANSWER_S = 3.0  # after which a server that is connected and silent counts as gone
RETRY_S = (0.05, 0.1, 0.2, 0.3)  # waits between attempts, the last one repeated: a restarted server waits a second
SOON_S = 5.0  # lost again within that time: coming back at once does not mend it
RESTART_CALLS = 64  # in one write
_logger = structlog.stdlib.get_logger(__name__)


class Link:
    """A session whose id is drawn anew when it was fenced; every change of route is told to `rerouted`.

    A server that was restarted gets the `restart_calls` before the session is active again.
    """

    def __init__(
        self,
        bus: Bus,
        name: str,
        address: str,
        ttl_s: float,
        *,
        awake_s: float = 0.0,
        shape: Shape | None = None,
        stats: PoolStats | None = None,
    ) -> None:
        self._bus = bus
        self._name = name
        self._address = address
        self._ttl_ms = int(ttl_s * 1000)
        self._shape = tuple((shape or {}).items())
        self._stats = stats or PoolStats()
        self._up = asyncio.Event()
        self._lost = asyncio.Event()
        self._num_losses = 0
        self._term = 0  # of the pool, the latest that was heard of
        self._clock_ms = 0.0  # the server's, at the beginning of this process's monotonic time
        self._back_s = float("-inf")  # when the server last came back
        self.heard_s = float("-inf")  # when it last answered while the session was active, monotonic
        self._relapses = 0  # losses in a row, each soon after the server had come back
        self._reminder = Reminder()
        self._calls: AsyncConnection | None = None
        self._reads: AsyncConnection | None = None
        self.bell = Doorbell(bus.keys, awake_s, is_for_all=False)
        self.sid = os.urandom(16)
        self.roster = Roster()  # who else is there, as surveys on this connection have told
        self.rerouted: Callable[[], None] = lambda: None
        self.restart_calls: Callable[[], Sequence[Call[Any]]] = lambda: ()  # what a restarted server is to be told

    @property
    def connected(self) -> bool:
        """Return whether the server answered last time and the session is active."""
        return self._up.is_set()

    def now_ms(self) -> int:
        """The server's clock, Unix time; hosts of gateways may have others."""
        return int(self._clock_ms + 1000 * time.monotonic())

    def ring(self) -> None:
        """Wakes idle services: a request is about to come."""
        if self._calls is not None and self.connected and (ring := self.bell.ring()) is not None:
            self._calls.post(ring)

    async def call(self, call: Call[R]) -> R:
        """As `execute`, for one call."""
        return cast(R, (await self.execute((call,)))[0])

    async def execute(self, calls: Sequence[Call[Any]]) -> list[Any]:
        """Carries out calls; a server that does not answer soon counts as gone.

        Raises:
            BusUnavailable: the server is gone; what was sent may or may not have been done.
            BusFull: the server is out of memory.
        """
        return await self._ask(self._calls, calls, ANSWER_S)

    async def read(self, read: Read) -> dict[bytes, list[Entry]]:
        """A blocking read, on a connection of its own.

        Raises:
            BusUnavailable: the server is gone.
        """
        answers = await self._ask(self._reads, (read,), ANSWER_S + read.block_ms / 1000)
        return cast(dict[bytes, list[Entry]], answers[0])

    async def _ask(
        self, connection: AsyncConnection | None, calls: Sequence[Call[Any]], patience_s: float
    ) -> list[Any]:
        if connection is None:
            raise BusUnavailable("the server was not reached yet")
        known_losses = self._num_losses
        try:
            async with RunningTimeout(patience_s):
                answers = await connection.execute(calls)
        except TimeoutError as error:
            reason = BusUnavailable(f"the server has not answered for {patience_s:g} s")
            self._lose(reason, known_losses)
            raise reason from error
        except BusUnavailable as error:
            self._lose(error, known_losses)
            raise
        # A server that came back without its last writes answers before it has been told of them.
        if self.connected and known_losses == self._num_losses:
            self.heard_s = time.monotonic()
        return answers

    def _lose(self, reason: BusUnavailable, known_losses: int) -> None:
        """A call found the server gone: nothing is sent until it said hello again, on connections made anew.

        Both may be to a server that is silent, or is not the primary any more. Losses of connections that were given up
        since the call began are known already.
        """
        if known_losses != self._num_losses:
            return
        self._num_losses += 1
        self._stats.losses[Loss.UNREACHABLE] += 1
        self.roster.forget()
        if self._reminder.is_due():
            _logger.warning("lost the Redis server: %s", reason)
        for connection in (self._calls, self._reads):
            if connection is not None:
                connection.drop()
        self.suspend()

    @property
    def text_stream(self) -> bytes:
        """The stream that this session delivers."""
        return self._bus.keys.text(self.sid)

    async def open(self) -> None:
        """Connects and says hello, however long the server takes to come.

        Raises:
            PenstockError: INTERNAL: the server is not fit for a pool, which waiting does not change.
        """
        attempt = 0
        while True:
            try:
                self._calls = self._calls or await self._bus.connect_async()
                self._reads = self._reads or await self._bus.connect_async()
                await self._greet(create=True)
            except (BusUnavailable, BusFull) as error:
                await self._wait(attempt, error)
                attempt += 1
            else:
                self._set_up()
                return

    def _set_up(self) -> None:
        self._lost.clear()
        self._up.set()
        self._stats.is_up = True

    def suspend(self) -> None:
        """Nothing is sent until the session is active again."""
        self._stats.is_up = False
        self._up.clear()
        self._lost.set()

    async def wait_connected(self) -> None:
        """Returns when calls may be sent."""
        await self._up.wait()

    async def back_within(self, seconds: float) -> bool:
        """Return whether calls may be sent, now or within so many seconds."""
        if self._up.is_set():
            return True
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                await self._up.wait()
        except TimeoutError:
            return False
        return True

    async def keep(self, status: Callable[[], bytes]) -> None:
        """Renews the session for ever, and gets it back when it was lost."""
        while True:
            try:
                async with asyncio.timeout(self._ttl_ms / 1000 / RENEWALS):
                    await self._lost.wait()
            except TimeoutError:
                if not await self._renew(status()):
                    self.suspend()
                    await self._recover()
            else:
                await self._recover()

    async def close(self) -> None:
        """Leaves in order; what the server cannot be told any more, expires there."""
        try:
            if self.connected:
                await self.execute((DropStream(self.text_stream), Leave(self.sid)))
        except (BusUnavailable, BusFull) as error:
            _logger.warning("left without a word to the bus: %s", error)
        self._stats.is_up = False
        self._up.clear()
        for connection in (self._calls, self._reads):
            if connection is not None:
                await connection.close()

    async def _renew(self, status: bytes) -> bool:
        try:
            renewed = await self.call(Renew(self.sid, self._ttl_ms, status, is_draining(status)))
            return bool(renewed)
        except (BusUnavailable, BusFull):
            return False

    async def _recover(self) -> None:
        loop = asyncio.get_running_loop()
        attempt = self._relapses = self._relapses + 1 if loop.time() - self._back_s < SOON_S else 0
        if attempt:
            await asyncio.sleep(RETRY_S[min(attempt, len(RETRY_S)) - 1])
        while True:
            try:
                greeting = await self._greet(create=False)
                if greeting.new_run or not greeting.active:
                    await self._testify()
                active = greeting.active or await self.call(Revalidate(self.sid, self._ttl_ms))
                if not active:
                    self.sid = os.urandom(16)
                    await self._greet(create=True)
            except (BusUnavailable, BusFull, PenstockError) as error:  # what has worked waits until it does again
                await self._wait(attempt, error)
                attempt += 1
            else:
                break
        self._back_s = loop.time()
        if not greeting.active:
            self._stats.losses[Loss.SUSPENDED if active else Loss.FENCED] += 1
        self._set_up()
        _logger.info("the bus is back", new_run=greeting.new_run, new_session=not active)
        self.rerouted()

    async def _testify(self) -> None:
        """While this session is suspended the pool waits for it; each hello gives it its time anew.

        What the calls found is not looked at: the re-attachments that follow find the same.
        """
        calls = self.restart_calls()
        for start in range(0, len(calls), RESTART_CALLS):
            await self.execute((self._hello(create=False), *calls[start : start + RESTART_CALLS]))

    async def _wait(self, attempt: int, error: Exception) -> None:
        if self._reminder.is_due():
            _logger.warning("waiting for the Redis server: %s", error)
        await asyncio.sleep(RETRY_S[min(attempt, len(RETRY_S) - 1)])

    async def _greet(self, *, create: bool) -> Greeting:
        sent_s = time.monotonic()
        greeting = await self.call(self._hello(create=create))
        self._term = max(self._term, greeting.term)
        self._clock_ms = greeting.now_ms - 1000 * (sent_s + time.monotonic()) / 2
        return greeting

    def _hello(self, *, create: bool) -> Hello:
        return Hello(
            self.sid, SessionKind.GATEWAY, self._name, self._address, self._ttl_ms, create, self._shape, self._term
        )
