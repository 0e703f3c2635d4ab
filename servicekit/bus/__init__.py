"""The bus: streams, requests, sessions and leases on one Redis or Valkey server, or in memory."""

from urllib.parse import urlsplit

from penstock.domain.errors import invalid
from servicekit.bus.interface import AsyncConnection, Bus, BusFull, BusUnavailable, Connection
from servicekit.bus.memory_bus import MemoryBus
from servicekit.bus.redis_bus import RedisBus
from servicekit.bus.redis_finder import SCHEMES, read_directory

__all__ = ["AsyncConnection", "Bus", "BusFull", "BusUnavailable", "Connection", "MemoryBus", "RedisBus", "open_bus"]

_memory_buses: dict[tuple[str, str], MemoryBus] = {}  # by name and pool: all of a process meet there


def open_bus(url: str, pool: str = "penstock", *, busy_poll_s: float = 0.0) -> Bus:
    """The bus at `url`; connects when asked to.

    Args:
        url: `redis://`, `rediss://`, `valkey://`, `unix://` or `sentinel://` as `read_directory` reads them; or
            `memory://NAME`, a bus of that name in this process.
        pool: one model pool's name; all of its keys carry it.
        busy_poll_s: how long blocking connections look for an answer without sleeping: saves the time of a wake-up, and
            keeps a core busy meanwhile. Nothing in memory.

    Raises:
        PenstockError: the URL cannot be understood.
    """
    scheme = urlsplit(url).scheme
    if scheme == "memory":
        return _memory_buses.setdefault((urlsplit(url).netloc, pool), MemoryBus(pool))
    if scheme in SCHEMES:
        return RedisBus(read_directory(url), pool, busy_poll_s=busy_poll_s)
    raise invalid(f"bus URL with the scheme {scheme!r}: it must be {', '.join(SCHEMES)} or memory", param="bus_url")
