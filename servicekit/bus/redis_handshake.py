"""The beginning of a connection, and the meaning of error replies: the same for both kinds of connection."""

from collections.abc import Iterable

import hiredis

from contract.domain.errors import ErrorCode, PenstockError
from servicekit.bus.commands import Command
from servicekit.bus.interface import BusFull, BusUnavailable, differs
from servicekit.bus.library import Library
from servicekit.bus.redis_address import RedisAddress
from servicekit.bus.replies import Reply

# How long a server that does not answer is waited for, on top of a call's own `block_ms`: as long as gateways wait. A
# process finds its half-open connections one after the other, and streams may stand still for each; its session must
# not be given up for stuck meanwhile.
PATIENCE_S = 3.0
# What an operator, a failover or a moment's time can change, by the code that the reply begins with: it is waited for.
_ADVICE = {
    "BUSY": "a script runs there",
    "LOADING": "it reads its data",
    "READONLY": "it is a replica, or not a primary any more",
    "MASTERDOWN": "it is a replica without its primary",
    "CLUSTERDOWN": "its cluster is incomplete",
    "TRYAGAIN": "its cluster moves the pool's slot",
    "ASK": "its cluster moves the pool's slot",
    "MOVED": "the pool's slot is at another node of its cluster",
    "REDIRECT": "it is not the primary any more",
    "NOREPLICAS": "it has too few replicas: look at min-replicas-to-write",
    "UNBLOCKED": "it is not the primary any more",
    "MISCONF": "it cannot write to its disk",
    "NOAUTH": "it wants a login: give the user and password, in the URL or by redis_password_file",
    "WRONGPASS": "it refuses the login: correct the user and password in the URL or in redis_password_file",
    "NOPERM": "it permits this user too little: docs/security.md has the rights that are needed",
    "DENIED": "it is in protected mode: set a password there, or bind it to an address",
}
# The same for replies that begin with ERR, by what stands in them.
_ADVICE_BY_TEXT = {
    "max number of clients reached": "raise its maxclients",
    "Function not found": "it lost Penstock's functions, which are loaded again",
    "user executing the script": _ADVICE["NOPERM"],
    "ACL failure in script": _ADVICE["NOPERM"],
    "without any password configured": "it has no password now, and the URL or redis_password_file gives one",
}


class BusMoved(BusUnavailable):
    """Another node of the cluster holds the pool."""


def first_commands(address: RedisAddress, library: Library, key: bytes) -> list[Command]:
    """The first commands of a new connection. The last reply lists the library; it is empty if the server lacks it.

    `key` is one of the pool's: a cluster's node that does not hold it says so.

    Raises:
        BusUnavailable: there are no credentials at the moment.
    """
    return [*address.login(), (b"EXISTS", key), (b"FUNCTION", b"LIST", b"LIBRARYNAME", library.name)]


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
    """The meaning of an error reply to a caller of the bus: to wait, unless waiting can never help."""
    text = str(error)
    code = text.partition(" ")[0]
    if code == "EVICTS":
        return PenstockError(
            ErrorCode.INTERNAL,
            f"the bus at {address} may drop keys of the pool, as its maxmemory-policy is {text.partition(' ')[2]}: "
            "set it to noeviction",
        )
    if code == "SHAPE":
        return differs(*text.split(" ")[1:4])
    if code == "OOM":
        return BusFull(f"the bus at {address} is out of memory: raise its maxmemory")
    advice = _ADVICE.get(code) or next((each for part, each in _ADVICE_BY_TEXT.items() if part in text), None)
    if advice is not None:
        kind = BusMoved if code == "MOVED" else BusUnavailable
        return kind(f"the bus at {address} is not ready, {advice}: {text}")
    return PenstockError(ErrorCode.INTERNAL, f"the bus at {address} refused a command; check its settings: {text}")
