"""Streams and consumer groups."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from servicekit.bus.calls.call import Call


@dataclass(frozen=True, slots=True)
class Entry:
    """One stream entry. `entry_id` is `ms-seq` as the server made it."""

    entry_id: bytes
    fields: dict[bytes, bytes]


@dataclass(frozen=True, slots=True)
class Append(Call[bytes]):
    """Adds an entry; the answer is its id. `cap` trims the stream to about so many entries; 0: not at all.

    A server that is full takes entries into capped streams only.
    """

    stream: bytes
    fields: Mapping[bytes, bytes]
    cap: int = 0


@dataclass(frozen=True, slots=True)
class Read(Call[dict[bytes, list[Entry]]]):
    """Entries after the given ids, by stream; streams without new entries are left out.

    Blocks up to `block_ms` until there is one; 0: not at all. Only the last call of an `execute` may block. For the
    first `awake_s` seconds of that a blocking connection looks for the answer instead of sleeping: it saves the time of
    a wake-up and costs a core, but nothing at the server.
    """

    streams: Mapping[bytes, bytes] = field(default_factory=dict)  # stream → id to read after
    count: int = 64  # entries per stream
    block_ms: int = 0
    awake_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ReadGroup(Call[list[Entry]]):
    """New entries of a stream for one consumer of a group (made when missing). Blocks up to `block_ms`; 0: not at all.

    Only the last call of an `execute` may block; `awake_s` is that of `Read`. With `pending`, instead of new entries
    those that this consumer was given and nobody acknowledged, the oldest first; that changes nothing, and whoever asks
    may be another process.
    """

    stream: bytes
    group: bytes
    consumer: bytes
    count: int
    block_ms: int = 0
    awake_s: float = 0.0
    pending: bool = False


@dataclass(frozen=True, slots=True)
class Reclaim(Call[list[Entry]]):
    """Entries that another consumer of the group took longer than `min_idle_ms` ago and never acknowledged."""

    stream: bytes
    group: bytes
    consumer: bytes
    min_idle_ms: int
    count: int


@dataclass(frozen=True, slots=True)
class Acknowledge(Call[None]):
    """A hint that leads nowhere (its request is gone): acknowledged and deleted."""

    stream: bytes
    group: bytes
    entry_id: bytes


@dataclass(frozen=True, slots=True)
class LastId(Call[bytes]):
    """The id of a stream's last entry, `0-0` if it never had one."""

    stream: bytes


@dataclass(frozen=True, slots=True)
class Length(Call[int]):
    """The number of entries of a stream."""

    stream: bytes


@dataclass(frozen=True, slots=True)
class DropStream(Call[None]):
    """Deletes a stream: a gateway's own text stream when it leaves."""

    stream: bytes
