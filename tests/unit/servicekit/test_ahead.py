"""What becomes of calls that go ahead of an exchange."""

from collections.abc import Sequence
from typing import Any

from servicekit.bus import BusFull, BusUnavailable
from servicekit.bus.ahead import Ahead
from servicekit.bus.calls import Call, LogBacklogs

FIRST, SECOND = LogBacklogs((1,)), LogBacklogs((2,))


class PretendedConnection:
    """Answers every call with its shards, unless it is told to fail."""

    def __init__(self) -> None:
        self.fails: Exception | None = None
        self.sent: list[Call[Any]] = []

    def send(self, calls: Sequence[Call[Any]]) -> None:
        self._raise()
        self.sent += calls

    def receive(self) -> list[Any]:
        self._raise()
        return [call.shards for call in self.sent if isinstance(call, LogBacklogs)]

    def execute(self, calls: Sequence[Call[Any]]) -> list[Any]:
        raise NotImplementedError

    def call(self, call: Call[Any]) -> Any:
        raise NotImplementedError

    def reconnect(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def _raise(self) -> None:
        if self.fails is not None:
            raise self.fails


def test_what_went_ahead_comes_with_its_answers_once() -> None:
    connection, ahead = PretendedConnection(), Ahead()
    assert ahead.send(connection, [FIRST, SECOND]) == []
    assert ahead.settle(connection) == ([FIRST, SECOND], [(1,), (2,)], [])
    assert ahead.settle(connection) == ([], [], [])


def test_what_cannot_be_sent_comes_back() -> None:
    connection, ahead = PretendedConnection(), Ahead()
    connection.fails = BusUnavailable("gone")
    assert ahead.send(connection, [FIRST]) == [FIRST]
    assert ahead.settle(connection) == ([], [], [])


def test_what_is_not_answered_is_to_be_sent_again() -> None:
    for error in (BusUnavailable("gone"), BusFull("no memory")):
        connection, ahead = PretendedConnection(), Ahead()
        ahead.send(connection, [FIRST])
        connection.fails = error
        assert ahead.settle(connection) == ([], [], [FIRST])
        assert ahead.take_back() == []


def test_what_is_given_up_while_it_is_on_its_way_comes_back() -> None:
    connection, ahead = PretendedConnection(), Ahead()
    ahead.send(connection, [FIRST])
    assert ahead.take_back() == [FIRST]
    assert ahead.take_back() == []
