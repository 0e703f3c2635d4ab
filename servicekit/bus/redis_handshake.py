"""How a connection begins, and what error replies mean: the same for both kinds of connection."""

from collections.abc import Iterable

import hiredis

from penstock.domain.errors import ErrorCode, PenstockError
from servicekit.bus.commands import Command, Reply
from servicekit.bus.interface import BusFull, BusUnavailable
from servicekit.bus.library import Library
from servicekit.bus.redis_address import RedisAddress

PATIENCE_S = 10.0  # how long a server that does not answer is waited for, on top of a call's own `block_ms`
_NOT_READY = frozenset(
    ("BUSY", "LOADING", "READONLY", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "NOREPLICAS", "UNBLOCKED", "MISCONF")
)


def first_commands(address: RedisAddress, library: Library) -> list[Command]:
    """What a new connection says first. The last reply lists the library; it is empty if the server lacks it."""
    return [*address.login(), (b"FUNCTION", b"LIST", b"LIBRARYNAME", library.name)]


def load_library(library: Library) -> Command:
    """The command that stores the functions on the server, where they outlast restarts."""
    return (b"FUNCTION", b"LOAD", library.source)


def check_replies(address: RedisAddress, replies: Iterable[Reply]) -> None:
    """Raises what the first error among the replies means."""
    for reply in replies:
        # Another connection may have loaded the library in the same moment.
        if isinstance(reply, hiredis.ReplyError) and "already exists" not in str(reply):
            raise bus_error(address, reply)


def bus_error(address: RedisAddress, error: Exception) -> Exception:
    """What an error reply means to a caller of the bus."""
    text = str(error)
    code = text.partition(" ")[0]
    if code in _NOT_READY:
        return BusUnavailable(f"the bus at {address} is not ready: {text}")
    if code == "OOM":
        return BusFull(f"the bus at {address} is out of memory: raise its maxmemory")
    return PenstockError(ErrorCode.INTERNAL, f"the bus at {address} refused a command; check its settings: {text}")
