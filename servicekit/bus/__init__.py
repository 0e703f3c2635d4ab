"""The bus: streams, requests, sessions and leases on one Redis or Valkey server."""

from urllib.parse import urlsplit

from contract.domain.errors import invalid
from servicekit.bus.interface import AsyncConnection, Bus, BusFull, BusUnavailable, Connection
from servicekit.bus.redis_bus import RedisBus
from servicekit.bus.redis_finder import SCHEMES, read_directory

__all__ = ["AsyncConnection", "Bus", "BusFull", "BusUnavailable", "Connection", "RedisBus", "open_bus"]


def open_bus(url: str, pool: str = "penstock", *, busy_poll_s: float = 0.0) -> Bus:
    """The bus at `url`; connects when asked to.

    Args:
        url: `redis://`, `rediss://`, `valkey://`, `unix://` or `sentinel://` as `read_directory` reads them.
        pool: one model pool's name; all of its keys carry it.
        busy_poll_s: how long blocking connections look for an answer without sleeping: saves the time of a wake-up, and
            keeps a core busy meanwhile.

    Raises:
        PenstockError: the URL cannot be understood.
    """
    scheme = urlsplit(url).scheme
    if scheme in SCHEMES:
        return RedisBus(read_directory(url), pool, busy_poll_s=busy_poll_s)
    raise invalid(f"bus URL with the scheme {scheme!r}: it must be one of {', '.join(SCHEMES)}", param="bus_url")
