"""The server itself: how full it is, and whether it can still write down what it has."""

from dataclasses import dataclass

from servicekit.bus.calls.call import Call


@dataclass(frozen=True, slots=True)
class ServerState:
    """A server's report on itself."""

    used_bytes: int  # of memory
    max_bytes: int  # beyond which it refuses writes; 0: no bound
    persists: bool  # whether it keeps an append-only file
    persistence_ok: bool  # whether the last append, rewrite and snapshot succeeded


@dataclass(frozen=True, slots=True)
class ReadServerState(Call[ServerState]):
    """The server's memory and the state of its persistence."""
