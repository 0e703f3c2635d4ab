"""The bus inside one process: the same calls and answers as `redis_bus`, for tests and for pipelines in memory."""

import asyncio
import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

from servicekit.bus.calls import Append, Call, Read, ReadGroup
from servicekit.bus.interface import BusUnavailable
from servicekit.bus.keys import Keys
from servicekit.bus.memory_pool import MemoryPool

R = TypeVar("R")


def _unix_ms() -> int:
    return time.time_ns() // 1_000_000


def _awaited_streams(call: Call[Any]) -> tuple[Iterable[bytes], float]:
    """The streams a call wants to wait for, and for how many seconds."""
    if isinstance(call, Read):
        return call.streams, call.block_ms / 1000
    if isinstance(call, ReadGroup):
        return (call.stream,), call.block_ms / 1000
    return (), 0.0


class MemoryBus:
    """One pool in memory. Connections may be used from any thread and any event loop.

    `now_ms` is the server's clock (Unix milliseconds) for leases, expiry and entry ids; waiting is in real time.
    """

    def __init__(self, pool: str = "penstock", now_ms: Callable[[], int] = _unix_ms) -> None:
        self._keys = Keys(pool)
        self._lock = threading.Lock()
        self._pool = MemoryPool(self._keys, now_ms, uuid.uuid4().hex)
        self._run = 0
        self._is_running = True
        self._waiting: dict[Callable[[], None], frozenset[bytes]] = {}  # wake → streams

    @property
    def keys(self) -> Keys:
        """The pool's names."""
        return self._keys

    def connect(self) -> "MemoryConnection":
        """A new blocking connection."""
        return MemoryConnection(self)

    async def connect_async(self) -> "AsyncMemoryConnection":
        """A new connection for the running event loop."""
        return AsyncMemoryConnection(self)

    def stop(self) -> None:
        """As if the server had died: every connection is lost, and no new one is made until `start`."""
        with self._lock:
            self._is_running = False
            self._run += 1
            waiting = list(self._waiting)
        for wake in waiting:
            wake()

    def start(self) -> None:
        """As if a server that was stopped had come back as another run, with everything it had."""
        with self._lock:
            self._is_running = True
            self._pool.new_run(uuid.uuid4().hex)

    def enter(self) -> int:
        """The present run, which a new connection belongs to.

        Raises:
            BusUnavailable: stopped.
        """
        if not self._is_running:
            raise BusUnavailable("the bus in memory was stopped")
        return self._run

    @property
    def run(self) -> int:
        """How often the bus was stopped: a connection belongs to one run."""
        return self._run

    def apply(self, calls: Sequence[Call[Any]], wake: Callable[[], None]) -> list[Any]:
        """Carries out calls in order. If the last one found nothing and wants to wait, `wake` is called at its streams'
        next entry (once or more often), until `forget(wake)`."""
        for call in calls:
            if isinstance(call, Read) and not call.streams:
                raise ValueError("Read needs at least one stream")
        with self._lock:
            answers = [self._pool.apply(call) for call in calls]
            streams, wait_s = _awaited_streams(calls[-1])
            if wait_s > 0 and not answers[-1]:
                self._waiting[wake] = frozenset(streams)
            waiting = list(self._waiting.items()) if self._waiting else []
        # Every function but a plain append may write to several streams: their readers look for themselves.
        plain = {call.stream for call in calls if isinstance(call, Append)} if all(map(_is_plain, calls)) else None
        for other, awaited in waiting:
            if other is not wake and (plain is None or plain & awaited):
                other()
        return answers

    def forget(self, wake: Callable[[], None]) -> None:
        """Ends a wait."""
        with self._lock:
            self._waiting.pop(wake, None)


def _is_plain(call: Call[Any]) -> bool:
    return isinstance(call, Append | Read | ReadGroup)


class MemoryConnection:
    """A blocking connection to a `MemoryBus`, used by one thread at a time."""

    def __init__(self, bus: MemoryBus) -> None:
        self._bus = bus
        self._run = bus.enter()
        self._closed = False
        self._woken = threading.Event()
        self._answers: list[Any] = []  # to what was sent
        self._is_waiting = False
        self._waited_ns = 0

    @property
    def waited_ns(self) -> int:
        """Until when its thread waited last, monotonic; now, while it does; 0: never."""
        return time.monotonic_ns() if self._is_waiting else self._waited_ns

    def call(self, call: Call[R]) -> R:
        """Carries out one call.

        Raises:
            BusUnavailable: closed, or the bus was stopped since.
        """
        return cast(R, self.execute((call,))[0])

    def send(self, calls: Sequence[Call[Any]]) -> None:
        """Carries out calls that do not block.

        Raises:
            BusUnavailable: closed, or the bus was stopped since.
        """
        self._answers = self.execute(calls)

    def receive(self) -> list[Any]:
        """The answers to what was sent last.

        Raises:
            BusUnavailable: closed, or the bus was stopped since.
        """
        self._check()
        answers, self._answers = self._answers, []
        return answers

    def execute(self, calls: Sequence[Call[Any]]) -> list[Any]:
        """Carries out calls in order; the last one may block.

        Raises:
            BusUnavailable: closed, or the bus was stopped since.
        """
        if not calls:
            return []
        _, wait_s = _awaited_streams(calls[-1])
        deadline_s = time.monotonic() + wait_s
        self._check()
        wake = self._woken.set
        self._is_waiting = True
        try:
            answers = self._bus.apply(calls, wake)
            while not answers[-1] and (left_s := deadline_s - time.monotonic()) > 0 and wait_s > 0:
                self._woken.wait(left_s)
                self._woken.clear()
                self._check()
                answers[-1:] = self._bus.apply(calls[-1:], wake)
        finally:
            if wait_s > 0:
                self._bus.forget(wake)
            self._waited_ns = time.monotonic_ns()
            self._is_waiting = False
        return answers

    def reconnect(self) -> None:
        """Belongs to the bus's present run from now on.

        Raises:
            BusUnavailable: the bus is stopped.
        """
        self._run = self._bus.enter()
        self._closed = False
        self._answers = []

    def close(self) -> None:
        """Closes; a thread blocked in `execute` gets BusUnavailable."""
        self._closed = True
        self._woken.set()

    def _check(self) -> None:
        if self._closed or self._run != self._bus.run:
            raise BusUnavailable("the connection to the bus in memory was closed")


class AsyncMemoryConnection:
    """A connection to a `MemoryBus` for one event loop."""

    def __init__(self, bus: MemoryBus) -> None:
        self._bus = bus
        self._run = bus.enter()
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self._woken: set[asyncio.Event] = set()

    async def call(self, call: Call[R]) -> R:
        """Carries out one call.

        Raises:
            BusUnavailable: closed, or the bus was stopped, before or while the call waited.
        """
        return cast(R, (await self.execute((call,)))[0])

    def post(self, call: Call[Any]) -> None:
        """Carries out a call whose answer nobody needs, unless the bus is gone."""
        with contextlib.suppress(BusUnavailable):
            self._bus.enter()
            self._bus.apply((call,), lambda: None)

    async def execute(self, calls: Sequence[Call[Any]]) -> list[Any]:
        """Carries out calls in order; the last one may block its task.

        Raises:
            BusUnavailable: closed, or the bus was stopped, before or while the last call waited.
        """
        if not calls:
            return []
        if self._closed:
            raise BusUnavailable("the connection to the bus in memory was closed")
        self._check(self._bus.enter())
        _, wait_s = _awaited_streams(calls[-1])
        deadline_s = time.monotonic() + wait_s
        woken = asyncio.Event()

        def wake() -> None:
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(woken.set)

        answers = self._bus.apply(calls, wake)
        self._woken.add(woken)
        try:
            while not answers[-1] and (left_s := deadline_s - time.monotonic()) > 0 and wait_s > 0:
                try:
                    # Not `wait_for`: in Python 3.11 it loses a cancellation that comes together with the event.
                    async with asyncio.timeout(left_s):
                        await woken.wait()
                except TimeoutError:
                    break
                woken.clear()
                self._check(self._bus.run)
                answers[-1:] = self._bus.apply(calls[-1:], wake)
        finally:
            self._woken.discard(woken)
            if wait_s > 0:
                self._bus.forget(wake)
        return answers

    def drop(self) -> None:
        """Nothing to give up: what is in this process always answers."""

    def _check(self, run: int) -> None:
        """A loss is told once; behind that the connection belongs to the bus's present run."""
        if self._closed or run != self._run:
            self._run = run
            raise BusUnavailable("the connection to the bus in memory was closed")

    async def close(self) -> None:
        """Closes; calls in flight raise BusUnavailable."""
        self._closed = True
        for woken in self._woken:
            woken.set()
