"""Requests that have ended, on their way to a collector of traces."""

from dataclasses import dataclass

from servicekit.bus.calls.call import Call


@dataclass(frozen=True, slots=True)
class Delivered(Call[None]):
    """Keeps, with each request or its result, when its client had all of it; the first to say so counts.

    If the request was retired with a trace, that is told to the collector too. A request that is not known is passed
    over: nobody can ask for it.
    """

    several: tuple[tuple[bytes, int], ...]  # (request_id, Unix time in nanoseconds)


@dataclass(frozen=True, slots=True)
class CountUntold(Call[int]):
    """Count the entries that `traces` had no room for since the pool began."""
