"""The bus on a Redis (7.0 or newer) or Valkey server."""

from servicekit.bus.call_times import CallTimes
from servicekit.bus.commands import Commands
from servicekit.bus.keys import Keys
from servicekit.bus.library import read_library
from servicekit.bus.redis_async_connection import AsyncRedisConnection
from servicekit.bus.redis_connection import RedisConnection
from servicekit.bus.redis_finder import Directory


class RedisBus:
    """One pool on one server. Holds no connection itself.

    Blocking connections look for answers without sleeping for up to `busy_poll_s` seconds.
    """

    def __init__(self, directory: Directory, pool: str = "penstock", *, busy_poll_s: float = 0.0) -> None:
        self._directory = directory
        self._busy_poll_s = busy_poll_s
        self._keys = Keys(pool)
        self._library = read_library()
        self._commands = Commands(self._keys, self._library)
        self._call_times = CallTimes()

    @property
    def keys(self) -> Keys:
        """The pool's names."""
        return self._keys

    @property
    def call_times(self) -> CallTimes:
        """Times until the server answered, on all connections."""
        return self._call_times

    def connect(self) -> RedisConnection:
        """A new blocking connection.

        Raises:
            BusUnavailable: the server cannot be reached.
        """
        return RedisConnection(
            self._directory.finder(), self._commands, self._library, self._call_times, busy_poll_s=self._busy_poll_s
        )

    async def connect_async(self) -> AsyncRedisConnection:
        """A new connection for the running event loop.

        Raises:
            BusUnavailable: the server cannot be reached.
        """
        connection = AsyncRedisConnection(self._directory.finder(), self._commands, self._library, self._call_times)
        await connection.connected()
        return connection
