"""Idle services hear that a request is on its way, and do not sleep for a while."""

import pytest
from memory_bus import MemoryBus

from servicekit.bus.calls import Read
from servicekit.bus.interface import Connection
from servicekit.doorbell import FEW, Doorbell

AWAKE_S = 0.01


class Clock:
    """Seconds that tests choose."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def ring(bell: Doorbell, connection: Connection) -> None:
    call = bell.ring()
    assert call is not None
    connection.call(call)


def listen(bell: Doorbell, connection: Connection) -> None:
    found = connection.call(Read(bell.listen(is_idle=True)))
    bell.hear(found)


def test_who_is_idle_hears_a_ring_and_does_not_sleep_until_it_has_faded() -> None:
    bus, clock = MemoryBus(), Clock()
    connection = bus.connect()
    bell, ringer = Doorbell(bus.keys, AWAKE_S, clock), Doorbell(bus.keys, AWAKE_S)
    assert bell.awake_s(1) == 0
    ring(ringer, connection)
    listen(bell, connection)
    assert bell.awake_s(1) == pytest.approx(AWAKE_S)
    clock.now_s += AWAKE_S / 2
    assert bell.awake_s(1) == pytest.approx(AWAKE_S / 2)
    clock.now_s += AWAKE_S
    assert bell.awake_s(1) == 0


def test_who_has_many_requests_sleeps_whenever_it_can() -> None:
    bus = MemoryBus()
    connection = bus.connect()
    bell = Doorbell(bus.keys, AWAKE_S, Clock())
    ring(bell, connection)
    listen(bell, connection)
    assert bell.awake_s(FEW) > 0
    assert bell.awake_s(FEW + 1) == 0
    assert bell.awake_s(0) == 0


def test_a_gateway_wakes_for_its_own_rings_only() -> None:
    bus, clock = MemoryBus(), Clock()
    connection = bus.connect()
    called, other = (Doorbell(bus.keys, AWAKE_S, clock, is_for_all=False) for _ in range(2))
    ring(called, connection)
    listen(called, connection)
    listen(other, connection)
    assert called.awake_s() > 0
    assert other.awake_s() == 0
    clock.now_s += AWAKE_S
    ring(other, connection)
    listen(called, connection)
    assert called.awake_s() == 0


def test_a_ring_is_heard_once() -> None:
    bus, clock = MemoryBus(), Clock()
    connection = bus.connect()
    bell = Doorbell(bus.keys, AWAKE_S, clock)
    ring(bell, connection)
    ring(bell, connection)
    listen(bell, connection)
    clock.now_s += AWAKE_S
    assert connection.call(Read(bell.listen(is_idle=True))) == {}


def test_who_is_busy_or_has_no_cores_to_spare_does_not_listen() -> None:
    names = MemoryBus().keys
    bell, deaf = Doorbell(names, AWAKE_S), Doorbell(names, 0.0)
    assert set(bell.listen(is_idle=True)) == {names.bell}
    assert bell.listen(is_idle=False) == {}
    assert deaf.listen(is_idle=True) == {}
    assert deaf.ring() is None
