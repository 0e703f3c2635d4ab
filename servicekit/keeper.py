"""Keeps a session alive while its loop is busy for longer than a lease lasts: a kernel is compiled, a log is read."""

import threading
from collections.abc import Callable

import structlog

from servicekit.bus import Bus, BusFull, BusUnavailable, Connection
from servicekit.bus.calls import Renew

_log = structlog.get_logger(__name__)


class Keeper:
    """A thread with a connection of its own, made when it is first needed.

    It only renews. Whatever else a renewal tells (fenced, suspended, no server) is for the loop to find out.
    """

    def __init__(self, bus: Bus, name: str, period_s: float, renewal: Callable[[], Renew | None]) -> None:
        """Runs at once.

        Args:
            bus: the pool.
            name: of the session, for logs.
            period_s: how often `renewal` is asked.
            renewal: what the loop should have sent and did not; None: nothing is late.
        """
        self._bus = bus
        self._name = name
        self._period_s = period_s
        self._renewal = renewal
        self._connection: Connection | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="keeper", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Nothing is renewed any more when this returns."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._period_s):
            if (renewal := self._renewal()) is not None:
                self._send(renewal)
        if self._connection is not None:
            self._connection.close()

    def _send(self, renewal: Renew) -> None:
        try:
            if self._connection is None:
                self._connection = self._bus.connect()
            self._connection.call(renewal)
        except (BusUnavailable, BusFull) as error:
            _log.debug("not renewed", session=self._name, reason=str(error))
            if self._connection is not None:
                self._connection.close()
            self._connection = None
