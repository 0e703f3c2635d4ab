"""The way of results to the scheduler: appended to `results:{worker}`, again and again while the bus is away."""

import threading

import structlog

from servicekit.bus import Bus, BusFull, BusUnavailable, Connection
from servicekit.bus.calls import Append
from servicekit.bus.keys import PAYLOAD, RESULTS_CAP

_log = structlog.get_logger(__name__)

_PAUSE_S = 0.1


class ResultStream:
    """Used by one thread. A result may be appended twice; the scheduler takes each step once."""

    def __init__(self, bus: Bus, worker: str, stop: threading.Event) -> None:
        """Nothing is connected yet. `stop` ends every wait for the bus."""
        self._bus = bus
        self._stream = bus.keys.results(worker)
        self._stop = stop
        self._connection: Connection | None = None

    def append(self, payload: bytes) -> None:
        """Append a penstock.v1.StepResult; waits for the bus. Once stopped, what cannot be appended is given up."""
        while True:
            try:
                if self._connection is None:
                    self._connection = self._bus.connect()
                self._connection.call(Append(self._stream, {PAYLOAD: payload}, RESULTS_CAP))
            except (BusUnavailable, BusFull) as error:
                _log.warning("result not appended yet", reason=str(error))
                if self._stop.wait(_PAUSE_S):
                    _log.error("result given up", reason=str(error))
                    return
                self._reconnect()
            else:
                return

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()

    def _reconnect(self) -> None:
        if self._connection is None:
            return
        try:
            self._connection.reconnect()
        except BusUnavailable as error:
            _log.debug("bus still away", reason=str(error))
