"""A few plain commands to a server, for who wants to know whether it is fit for a pool."""

from collections.abc import Sequence
from contextlib import closing
from typing import Any

import hiredis

from servicekit.bus.commands import Command, pack
from servicekit.bus.interface import BusUnavailable
from servicekit.bus.redis_address import RedisAddress
from servicekit.bus.redis_finder import read_directory
from servicekit.bus.redis_handshake import bus_error

_CHUNK_BYTES = 65536


def find_address(url: str) -> RedisAddress:
    """The server that a bus URL leads to now.

    Raises:
        PenstockError: the URL cannot be understood.
        BusUnavailable: the sentinels do not say.
    """
    return read_directory(url).finder().find()


def ask(address: RedisAddress, commands: Sequence[Command]) -> list[Any]:
    """The replies to commands, on a connection of their own; one that is refused is the reply's exception.

    Raises:
        BusUnavailable: the server cannot be reached, or refuses the login.
        PenstockError: INTERNAL: it refuses the login for a reason that does not pass.
    """
    login = address.login()
    reader = hiredis.Reader()
    replies: list[Any] = []
    try:
        with closing(address.open_socket()) as connection:
            for command in (*login, *commands):
                connection.sendall(pack(command))
            while len(replies) < len(login) + len(commands):
                if (reply := reader.gets()) is not False:
                    replies.append(reply)
                elif data := connection.recv(_CHUNK_BYTES):
                    reader.feed(data)
                else:
                    raise BusUnavailable(f"the bus at {address} hung up")
    except OSError as error:
        raise BusUnavailable(f"the bus at {address} cannot be reached: {error}") from error
    for reply in replies[: len(login)]:
        if isinstance(reply, hiredis.ReplyError):
            raise bus_error(address, reply)
    return replies[len(login) :]


def read_info(text: bytes) -> dict[str, str]:
    """The fields of a reply to INFO."""
    lines = (line.partition(":") for line in text.decode(errors="replace").splitlines() if not line.startswith("#"))
    return {name: value for name, _, value in lines if name}
