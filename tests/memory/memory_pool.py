"""The calls of one pool, carried out on a server in memory."""

from collections.abc import Sequence
from typing import Any

import hiredis
from hiredis import ReplyError
from memory_server import MemoryServer
from memory_store import Reply

from servicekit.bus.calls import Call
from servicekit.bus.commands import Commands
from servicekit.bus.keys import Keys
from servicekit.bus.library import Library
from servicekit.bus.redis_address import RedisAddress
from servicekit.bus.redis_handshake import bus_error, load_library

_ADDRESS = RedisAddress("memory")


class MemoryPool:
    """As a connection does it: calls become what is sent, and what is received answers. Nothing waits."""

    def __init__(self, keys: Keys, server: MemoryServer, library: Library) -> None:
        self._server = server
        self._commands = Commands(keys, library)
        self._reader = hiredis.Reader()
        server.execute(load_library(library))  # type: ignore[arg-type]  # it has bytes only

    def execute(self, calls: Sequence[Call[Any]]) -> list[Any]:
        """The answers to calls.

        Raises:
            ValueError: a call asks for nothing; none is carried out.
            PenstockError: one is refused; the others are carried out.
        """
        packed = [self._commands.encode(call) for call in calls]
        replies = [self._reply(call, command) for call, command in zip(calls, packed, strict=True)]
        for reply in replies:
            if isinstance(reply, ReplyError):
                raise bus_error(_ADDRESS, reply)
        return [self._commands.decode(call, reply) for call, reply in zip(calls, replies, strict=True)]

    def _reply(self, call: Call[Any], packed: bytes) -> Reply | ReplyError:
        reply = self._send(packed)
        if isinstance(reply, ReplyError):
            for command in self._commands.repair(call, reply) or ():
                reply = self._send(command)
        return reply

    def _send(self, packed: bytes) -> Reply | ReplyError:
        self._reader.feed(packed)
        try:
            reply = self._server.execute(self._reader.gets())
        except ReplyError as error:
            return error
        return reply.encode() if isinstance(reply, str) else reply
