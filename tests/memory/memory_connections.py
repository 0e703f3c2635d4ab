"""Connections to a bus in memory: a blocking one, and one for an event loop."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, cast

from servicekit.bus.calls import Call
from servicekit.bus.commands import block_s
from servicekit.bus.interface import BusUnavailable

R = TypeVar("R")


class Served(Protocol):
    """The side of a bus that its connections use."""

    @property
    def run(self) -> int:
        """The number of times the bus was stopped: a connection belongs to one run."""
        ...

    def enter(self) -> int:
        """The present run, which a new connection belongs to.

        Raises:
            BusUnavailable: stopped.
        """
        ...

    def apply(self, calls: Sequence[Call[Any]], wake: Callable[[], None]) -> list[Any]:
        """Carries out calls in order. If the last one found nothing and wants to wait, `wake` is called at its streams'
        next entry (once or more often), until `forget(wake)`.
        """
        ...

    def forget(self, wake: Callable[[], None]) -> None:
        """Ends a wait."""
        ...


class MemoryConnection:
    """A blocking connection to a `MemoryBus`, used by one thread at a time."""

    def __init__(self, bus: Served) -> None:
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
        wait_s = block_s(calls[-1])
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

    def __init__(self, bus: Served) -> None:
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
        wait_s = block_s(calls[-1])
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
        """A loss is told once; after that the connection belongs to the bus's present run."""
        if self._closed or run != self._run:
            self._run = run
            raise BusUnavailable("the connection to the bus in memory was closed")

    async def close(self) -> None:
        """Closes; calls in flight raise BusUnavailable."""
        self._closed = True
        for woken in self._woken:
            woken.set()
