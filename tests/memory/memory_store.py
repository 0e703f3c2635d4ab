"""The store of a server in memory: values of one type by key, each until its time is over."""

from collections.abc import Callable
from typing import Any, TypeVar

from hiredis import ReplyError
from memory_streams import Stream

# As hiredis reads it; a `str` is a status, such as OK.
Reply = bytes | str | int | list[Any] | None


class Hash(dict[bytes, bytes]):
    """Values by field."""


class Set(set[bytes]):
    """Members."""


class SortedSet(dict[bytes, float]):
    """Scores by member."""


Value = bytes | Hash | Set | SortedSet | Stream
V = TypeVar("V", bytes, Hash, Set, SortedSet, Stream)


class Store:
    """All keys. Not locked. `now_ms` is the server's clock: Unix milliseconds."""

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self.now_ms = now_ms
        self.values: dict[bytes, Value] = {}
        self.expiries: dict[bytes, int] = {}  # Unix milliseconds, of keys that have a time

    def find(self, key: bytes, kind: type[V]) -> V | None:
        """The value of a key, only to be read.

        Raises:
            ReplyError: it is of another type.
        """
        value = self.values.get(key) if self.exists(key) else None
        if value is not None and type(value) is not kind:
            raise ReplyError("WRONGTYPE Operation against a key holding the wrong kind of value")
        return value

    def made(self, key: bytes, kind: type[V]) -> V:
        """The value of a key, made when missing, to be changed.

        Raises:
            ReplyError: it is of another type.
        """
        value = self.find(key, kind)
        if value is None:
            value = self.values[key] = kind()
        return value

    def exists(self, key: bytes) -> bool:
        """Return whether a key has a value of any type, whose time is not over."""
        if key in self.expiries and self.expiries[key] <= self.now_ms():
            del self.values[key], self.expiries[key]
        return key in self.values

    def put(self, key: bytes, value: bytes) -> None:
        """Gives a key a value for good."""
        self.values[key] = value
        self.expiries.pop(key, None)

    def delete(self, key: bytes) -> bool:
        """Return whether there was anything to delete."""
        there = self.exists(key)
        self.expiries.pop(key, None)
        self.values.pop(key, None)
        return there

    def delete_if_empty(self, key: bytes) -> None:
        """No hash, set or sorted set is ever empty."""
        if not self.values.get(key, True):
            self.delete(key)

    def expire(self, key: bytes, ms: int) -> bool:
        """Sets a key's time from now on; False: there is no such key."""
        if not self.exists(key):
            return False
        self.expiries[key] = self.now_ms() + ms
        return True
