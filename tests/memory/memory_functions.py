"""Function libraries, run by the same Lua that servers have in them."""

from collections.abc import Callable
from typing import Any

import msgspec
from hiredis import ReplyError
from lupa import lua51
from memory_commands import written
from memory_store import Reply

Lua = Any  # a table, a function, or bytes, bool, None or a number: an int where it is whole


class Functions:
    """The functions of a server. `call` carries out a command, as `redis.call` does."""

    def __init__(self, call: Callable[[list[bytes]], Reply]) -> None:
        self._call = call
        self._functions: dict[bytes, Lua] = {}
        self._lua = lua51.LuaRuntime(encoding=None)
        self._table = self._lua.table_from
        names: Lua = self._lua.globals()
        names[b"redis"] = self._table(
            {
                b"call": self._redis_call,
                b"error_reply": lambda text: self._table({b"err": text}),
                b"register_function": self._register,
            }
        )
        names[b"cmsgpack"] = self._table({b"pack": self._pack, b"unpack": self._unpack})

    def load(self, source: bytes) -> None:
        """A library, as `FUNCTION LOAD` takes it: its first line says its name."""
        self._lua.execute(source.partition(b"\n")[2])

    def run(self, name: bytes, keys: list[bytes], args: list[bytes]) -> Reply:
        """The reply of a function.

        Raises:
            ReplyError: there is no such function, or it says so.
        """
        if name not in self._functions:
            raise ReplyError("ERR Function not found")
        return self._reply(self._functions[name](self._table(keys), self._table(args)))

    def _register(self, spec: Lua) -> None:
        self._functions[spec[b"function_name"]] = spec[b"callback"]

    def _redis_call(self, *words: Lua) -> Lua:
        return self._value(self._call([each if type(each) is bytes else _word(each) for each in words]))

    def _value(self, reply: Reply) -> Lua:
        """Convert a reply as `redis.call` does: nothing is false, and a status a table."""
        if isinstance(reply, list):
            return self._table([each if type(each) is bytes else self._value(each) for each in reply])
        if isinstance(reply, str):
            return self._table({b"ok": reply.encode()})
        return False if reply is None else reply

    def _reply(self, value: Lua) -> Reply:
        """Convert a function's result as the server does: numbers lose their fractions, and true is 1."""
        if type(value) is bytes:
            return value
        if value is None or value is False:
            return None
        if lua51.lua_type(value) == "table":
            if (error := value[b"err"]) is not None:
                raise ReplyError(error.decode())
            return [self._reply(each) for each in _items(value)]
        return int(value)

    def _pack(self, table: Lua) -> bytes:
        return msgspec.msgpack.encode(_items(table))

    def _unpack(self, packed: bytes) -> Lua:
        return self._table(msgspec.msgpack.decode(packed))


def _word(value: Lua) -> bytes:
    """An argument of a command, as the server writes Lua's numbers."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ReplyError("ERR Lua redis lib command arguments must be strings or integers")
    return written(float(value))


def _items(table: Lua) -> list[Lua]:
    """A list's items: it ends where nothing is."""
    items: list[Lua] = []
    while (item := table[len(items) + 1]) is not None:
        items.append(item)
    return items
