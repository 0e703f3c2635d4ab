"""The way of results to the scheduler: appended to `results:{worker}`, again and again while the bus is away."""

import threading
from collections.abc import Callable, Mapping

import structlog

from servicekit.bus import Bus, BusFull, BusUnavailable, Connection
from servicekit.bus.calls import Append, KeepPromptOutput
from servicekit.bus.keys import PAYLOAD, RESULTS_CAP
from servicekit.reminder import Reminder

_log = structlog.get_logger(__name__)

_PAUSE_S = 0.1


class ResultStream:
    """Used by one thread. A result may be appended twice; the scheduler takes each step once.

    Nobody waits for the server's answer to a result while there is another step to wait for: it is read when the next
    result is sent, or when there is nothing else to do.
    """

    def __init__(self, bus: Bus, worker: str, model_digest: bytes, stop: threading.Event) -> None:
        """Nothing is connected yet. `stop` ends every wait for the bus."""
        self._bus = bus
        self._model_digest = model_digest
        self._stream = bus.keys.results(worker)
        self._stop = stop
        self._connection: Connection | None = None
        self._unanswered: bytes | None = None  # the result that was sent last
        self._reminder = Reminder()

    def append(self, payload: bytes) -> None:
        """Append a penstock.v1.StepResult; waits for the bus. Once stopped, what cannot be appended is given up.

        That it has arrived is known after the next `append` or `settle`.
        """
        self.settle()
        self._insist(lambda connection: self._send(connection, payload))

    def keep(self, prompts: Mapping[bytes, bytes]) -> None:
        """Keep what was computed of prompts with their requests; it is there before whatever is appended after it."""
        self.settle()
        calls = [KeepPromptOutput(each, self._model_digest, output) for each, output in prompts.items()]
        self._insist(lambda connection: connection.execute(calls))

    def settle(self) -> None:
        """Wait until what was appended has arrived."""
        if self._unanswered is not None:
            self._insist(self._receive)

    def _send(self, connection: Connection, payload: bytes) -> None:
        connection.send((Append(self._stream, {PAYLOAD: payload}, RESULTS_CAP),))
        self._unanswered = payload

    def _receive(self, connection: Connection) -> None:
        """The answer to the last result, which is sent again if there has been none."""
        if self._unanswered is None:
            return
        if not connection.receive():
            self._send(connection, self._unanswered)
            connection.receive()
        self._unanswered = None

    def _insist(self, exchange: Callable[[Connection], object]) -> None:
        """Again and again while the bus is away, each time on a new connection."""
        while True:
            try:
                if self._connection is None:
                    self._connection = self._bus.connect()
                exchange(self._connection)
            except (BusUnavailable, BusFull) as error:
                if self._reminder.is_due():
                    _log.warning("result not appended yet", reason=str(error))
                if self._stop.wait(_PAUSE_S):
                    _log.error("result given up", reason=str(error))
                    self._unanswered = None
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
