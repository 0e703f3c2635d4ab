"""The bus as services see it; `redis_bus` is it on Redis or Valkey, and tests have it on a server in memory."""

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from contract.domain.errors import ErrorCode, PenstockError
from servicekit.bus.call_times import CallTimes
from servicekit.bus.calls import Call
from servicekit.bus.keys import Keys

R = TypeVar("R")


class BusUnavailable(Exception):  # noqa: N818  (a state of the world, not a mistake)
    """The server cannot be reached or went away in the middle; what was sent may or may not have been done.

    Every call may be sent again. `Connection.reconnect` waits for the server.
    """


class BusFull(Exception):  # noqa: N818
    """The server refuses writes because it is at `maxmemory`. The call was not carried out."""


_REMEDIES = {
    "num_shards": "give all services of a pool the same --num-shards",
    "protocol": "run one version of Penstock in a pool: let the other one end first",
    "vocabulary": "give all services of a pool the same --model and --revision",
    "chat_template": "give all tokenizers of a pool the same --model and --revision",
    "generation_defaults": "give all tokenizers of a pool the same --model, --revision and --generation-config",
}


def differs(part: str, agreed: str, told: str) -> PenstockError:
    """The error of a process whose shape is not its pool's."""
    remedy = _REMEDIES.get(part, "start all services of a pool alike")
    message = f"the pool's {part} is {agreed}, this process's {told}: {remedy}, or this one another --pool"
    return PenstockError(ErrorCode.INTERNAL, message)


class Connection(Protocol):
    """A blocking connection, used by one thread at a time."""

    @property
    def waited_ns(self) -> int:
        """Until when its thread waited for the server last, monotonic; now, while it does; 0: never. For any thread."""
        ...

    def call(self, call: Call[R]) -> R:
        """Carries out one call.

        Raises:
            BusUnavailable: the server is gone.
            BusFull: the server is out of memory.
        """
        ...

    def execute(self, calls: Sequence[Call[Any]]) -> list[Any]:
        """Carries out calls in order, in one write; answers in order. BusFull is raised after all are read."""
        ...

    def send(self, calls: Sequence[Call[Any]]) -> None:
        """The first half of `execute`, for calls none of which blocks; nothing else is sent before `receive`."""
        ...

    def receive(self) -> list[Any]:
        """The second half: the answers to what was sent last. After an error nothing is left to be received."""
        ...

    def reconnect(self) -> None:
        """Drops what is left of the connection and makes one attempt at a new one.

        Raises:
            BusUnavailable: not reachable yet.
        """
        ...

    def close(self) -> None:
        """Closes; a thread blocked in `execute` gets BusUnavailable."""
        ...


class AsyncConnection(Protocol):
    """A connection for an event loop: calls of many tasks are pipelined. Not for blocking reads beside other calls."""

    async def call(self, call: Call[R]) -> R:
        """As `Connection.call`; reconnects by itself, calls in flight at a loss raise BusUnavailable."""
        ...

    async def execute(self, calls: Sequence[Call[Any]]) -> list[Any]:
        """As `Connection.execute`."""
        ...

    def post(self, call: Call[Any]) -> None:
        """Sends a call whose answer nobody needs, at once. Whether it arrives is not told."""
        ...

    def drop(self) -> None:
        """Gives up the connection as it is: calls in flight raise BusUnavailable, the next one connects anew."""
        ...

    async def close(self) -> None:
        """Closes; calls in flight raise BusUnavailable."""
        ...


class Bus(Protocol):
    """One pool on one server."""

    @property
    def keys(self) -> Keys:
        """The pool's names."""
        ...

    @property
    def call_times(self) -> CallTimes:
        """Times until the server answered, on all connections."""
        ...

    def connect(self) -> Connection:
        """A new blocking connection.

        Raises:
            BusUnavailable: the server cannot be reached.
        """
        ...

    async def connect_async(self) -> AsyncConnection:
        """A new connection for the running event loop.

        Raises:
            BusUnavailable: the server cannot be reached.
        """
        ...
