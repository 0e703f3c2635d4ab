"""The bus on a server in memory: the shipped functions, the same calls and answers as on another server."""

import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from memory_connections import AsyncMemoryConnection, MemoryConnection
from memory_pool import MemoryPool
from memory_server import MemoryServer
from memory_store import Store

from servicekit.bus.call_times import CallTimes
from servicekit.bus.calls import Call, Read, ReadGroup
from servicekit.bus.commands import block_s
from servicekit.bus.interface import BusUnavailable
from servicekit.bus.keys import Keys
from servicekit.bus.library import Library, read_library

_SHIPPED = read_library()


def _unix_ms() -> int:
    return time.time_ns() // 1_000_000


class MemoryBus:
    """One pool in memory. Connections may be used from any thread and any event loop.

    `now_ms` is the server's clock (Unix milliseconds) for leases, expiry and entry ids; waiting is in real time.
    """

    def __init__(
        self, pool: str = "penstock", now_ms: Callable[[], int] = _unix_ms, library: Library = _SHIPPED
    ) -> None:
        self._keys = Keys(pool)
        self._lock = threading.Lock()
        self.server = MemoryServer(Store(now_ms), uuid.uuid4().hex)
        self._pool = MemoryPool(self._keys, self.server, library)
        self._run = 0
        self._is_running = True
        self._waiting: dict[Callable[[], None], frozenset[bytes]] = {}  # wake → streams
        self._call_times = CallTimes()

    @property
    def keys(self) -> Keys:
        """The pool's names."""
        return self._keys

    @property
    def call_times(self) -> CallTimes:
        """The times of calls."""
        return self._call_times

    def connect(self) -> MemoryConnection:
        """A new blocking connection."""
        return MemoryConnection(self)

    async def connect_async(self) -> AsyncMemoryConnection:
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
            self.server.run_id = uuid.uuid4().hex

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
        """The number of times the bus was stopped: a connection belongs to one run."""
        return self._run

    def apply(self, calls: Sequence[Call[Any]], wake: Callable[[], None]) -> list[Any]:
        """Carries out calls in order. If the last one found nothing and wants to wait, `wake` is called at its streams'
        next entry (once or more often), until `forget(wake)`.
        """
        began_s = time.perf_counter()
        with self._lock:
            answers = self._pool.execute(calls)
            if block_s(calls[-1]) > 0 and not answers[-1]:
                self._waiting[wake] = _streams(calls[-1])
            appended = self.server.take_appended()
            woken = [other for other, awaited in self._waiting.items() if other is not wake and appended & awaited]
        self._call_times.observe(calls, time.perf_counter() - began_s)
        for other in woken:
            other()
        return answers

    def forget(self, wake: Callable[[], None]) -> None:
        """Ends a wait."""
        with self._lock:
            self._waiting.pop(wake, None)


def _streams(call: Call[Any]) -> frozenset[bytes]:
    """The streams that a call reads."""
    if isinstance(call, Read):
        return frozenset(call.streams)
    return frozenset((call.stream,)) if isinstance(call, ReadGroup) else frozenset()
