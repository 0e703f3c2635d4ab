import socket

import pytest

from penstock.launcher import ports
from penstock.launcher.ports import free_ports


def test_free_ports_differ() -> None:
    assert len(set(free_ports(50))) == 50


def test_processes_that_start_after_each_other_find_different_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    for pid in range(40_000, 40_030):
        monkeypatch.setattr(ports.os, "getpid", lambda pid=pid: pid)
        found += free_ports(50)
    assert len(set(found)) == len(found)


def test_a_port_that_somebody_has_is_not_free() -> None:
    (port,) = free_ports(1)
    with socket.create_server(("127.0.0.1", port)):
        assert port not in free_ports(50)


@pytest.mark.parametrize("first_ephemeral", [0, ports.FIRST_PORT + 3])
def test_where_few_ports_are_kept_from_connections_others_are_found(
    monkeypatch: pytest.MonkeyPatch, first_ephemeral: int
) -> None:
    monkeypatch.setattr(ports, "first_ephemeral_port", lambda: first_ephemeral)
    assert len(set(free_ports(50))) == 50
