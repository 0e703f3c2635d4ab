"""Calls that go ahead of an exchange: the server works on them while the next ones are made."""

from typing import Any, NamedTuple

from servicekit.bus.calls import Call
from servicekit.bus.interface import BusFull, BusUnavailable, Connection

Calls = list[Call[Any]]


class Settled(NamedTuple):
    """The outcome of calls that went ahead."""

    calls: Calls  # that have been carried out
    answers: list[Any]  # to them
    again: Calls  # that may not have been: they are to be sent again


class Ahead:
    """Calls that were sent on one connection and not answered yet. Only what may be sent twice: whoever has carried it
    out already must do nothing then.
    """

    def __init__(self) -> None:
        self._calls: Calls = []

    def send(self, connection: Connection, calls: Calls) -> Calls:
        """Send calls none of which blocks, when all before are settled; what could not be sent comes back."""
        self._calls = calls
        try:
            connection.send(calls)
        except BusUnavailable:
            return self.take_back()
        return []

    def settle(self, connection: Connection) -> Settled:
        """Wait for the answers to what was sent."""
        if not self._calls:
            return Settled([], [], [])
        try:
            answers = connection.receive()
        except (BusUnavailable, BusFull):
            return Settled([], [], self.take_back())
        return Settled(self.take_back(), answers, [])

    def take_back(self) -> Calls:
        """The calls that were sent and not taken yet; nothing is waited for any more."""
        calls, self._calls = self._calls, []
        return calls
