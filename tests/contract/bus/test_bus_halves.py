"""`execute` in two halves: what is sent is carried out, and its answers can be fetched later."""

from collections.abc import Callable
from typing import Protocol

import pytest

from servicekit.bus import Bus, BusUnavailable
from servicekit.bus.calls import Append, Length


class Outage(Protocol):
    bus: Bus
    kill: Callable[[], None]
    start: Callable[[], None]


def append(bus: Bus, text: bytes) -> Append:
    return Append(bus.keys.results("w"), {b"t": text}, 8)


def test_answers_are_those_to_what_was_sent_last(bus: Bus) -> None:
    connection = bus.connect()
    connection.send((append(bus, b"1"), Length(bus.keys.results("w"))))
    entry_id, length = connection.receive()
    assert length == 1
    connection.send((append(bus, b"2"),))
    (other_id,) = connection.receive()
    assert other_id != entry_id
    assert connection.execute((Length(bus.keys.results("w")),)) == [2]
    connection.close()


def test_what_was_sent_arrives_though_nobody_asks(bus: Bus) -> None:
    first, second = bus.connect(), bus.connect()
    first.send((append(bus, b"1"),))
    while second.call(Length(bus.keys.results("w"))) == 0:
        pass
    first.close()
    second.close()


def test_without_anything_sent_there_is_nothing_to_receive(bus: Bus) -> None:
    connection = bus.connect()
    assert connection.receive() == []
    connection.send((append(bus, b"1"),))
    connection.receive()
    assert connection.receive() == []
    connection.close()


def test_what_was_not_answered_before_an_outage_is_not_answered_after_it(outage: Outage) -> None:
    connection = outage.bus.connect()

    def exchange() -> None:
        connection.send((append(outage.bus, b"1"),))
        connection.receive()

    outage.kill()
    with pytest.raises(BusUnavailable):
        exchange()
    outage.start()
    connection.reconnect()
    assert connection.receive() == []
    assert connection.call(Length(outage.bus.keys.results("w"))) == 0
    connection.close()
