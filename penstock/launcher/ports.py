"""TCP ports: such as nobody has, and sockets that are bound to them."""

import contextlib
import os
import socket
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from contract.domain.errors import ErrorCode, PenstockError
from servicekit.settings import split_address

FIRST_PORT = 20_000  # of those that are found for services whose port nobody chose
_GOLDEN_RATIO = (5**0.5 - 1) / 2  # its multiples stand as far apart as any do, however many there are
_PORTS = 65_536


class Listener(NamedTuple):
    """One who is to listen."""

    name: str
    address: str
    flag: str  # which decides the port


def bind(listeners: Iterable[Listener]) -> ExitStack:
    """Sockets that are bound to all of these addresses until the stack is closed, and do not listen.

    Raises:
        PenstockError: INTERNAL (the operator's fault): a port is taken, or the address is not one of this machine.
    """
    with ExitStack() as stack:
        for each in listeners:
            host, port = split_address(each.address)
            bound = stack.enter_context(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
            # Servers have it as well: of two sockets that have it, one may listen where the other is bound.
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                bound.bind((host, port))
            except OSError as error:
                message = f"{each.name} cannot listen on {each.address} ({error}): choose another --{each.flag}"
                raise PenstockError(ErrorCode.INTERNAL, message) from error
        return stack.pop_all()


def ports_from(first: int, count: int) -> list[int]:
    """So many ports from one on, the first one last.

    Raises:
        PenstockError: INTERNAL (the operator's fault): there are not so many.
    """
    if first + count > _PORTS:
        raise PenstockError(ErrorCode.INTERNAL, f"--first-port may be at most {_PORTS - count}: {count} are needed")
    return list(range(first + count - 1, first - 1, -1))


def free_ports(count: int) -> list[int]:
    """Different TCP ports that nobody has at the moment.

    As far as there are any, of those that no connection is given as its near end: they stay free until their service
    listens, and while it is started again. Each process looks elsewhere first, so that two do not find the same: those
    that are started right after each other, of which each may want some fifty, the furthest from each other.
    """
    candidates = range(FIRST_PORT, first_ephemeral_port())
    start = int(os.getpid() * _GOLDEN_RATIO % 1 * len(candidates))
    wanted = [candidates[(start + offset) % len(candidates)] for offset in range(len(candidates))] + [0] * count
    found: list[int] = []
    with ExitStack() as stack:
        for port in wanted:
            if len(found) == count:
                break
            probe = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                found.append(int(probe.getsockname()[1]))
    return found


def first_ephemeral_port() -> int:
    """The system gives ports from this one on to the near ends of connections."""
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text("ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return 49_152  # as IANA has it, where the system does not say
