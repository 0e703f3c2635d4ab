"""Streams in memory: entries in order of their ids, consumer groups with what they have not acknowledged yet."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from servicekit.bus import calls as c

EntryId = tuple[int, int]  # milliseconds, sequence number


def parse_id(entry_id: bytes) -> EntryId:
    """The two numbers of `ms-seq`; `ms` alone means `ms-0`."""
    milliseconds, _, sequence = entry_id.partition(b"-")
    return int(milliseconds), int(sequence or 0)


def format_id(entry_id: EntryId) -> bytes:
    """`ms-seq`."""
    return b"%d-%d" % entry_id


@dataclass(slots=True)
class _Pending:
    consumer: bytes
    delivered_ms: int


@dataclass(slots=True)
class _Group:
    last_delivered: EntryId = (0, 0)
    pending: dict[EntryId, _Pending] = field(default_factory=dict)  # in order of ids


class MemoryStream:
    """One stream. Not locked: its pool is."""

    def __init__(self) -> None:
        self._ids: list[EntryId] = []  # ascending
        self._fields: dict[EntryId, dict[bytes, bytes]] = {}
        self._groups: dict[bytes, _Group] = {}
        self._last: EntryId = (0, 0)

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def last_id(self) -> bytes:
        """The id of the last entry that was ever added."""
        return format_id(self._last)

    def add(self, fields: Mapping[bytes, bytes], now_ms: int, cap: int = 0) -> bytes:
        """Adds an entry and answers its id, which is greater than every id before. Keeps the newest `cap` if given."""
        milliseconds, sequence = self._last
        self._last = (now_ms, 0) if now_ms > milliseconds else (milliseconds, sequence + 1)
        self._ids.append(self._last)
        self._fields[self._last] = {bytes(name): bytes(value) for name, value in fields.items()}
        if 0 < cap < len(self._ids):
            self._drop_first(len(self._ids) - cap)
        return format_id(self._last)

    def read(self, behind: bytes, count: int) -> list[c.Entry]:
        """Up to `count` entries behind an id; 0: all."""
        first = bisect_right(self._ids, parse_id(behind))
        return self._entries(self._ids[first : first + count if count else None])

    def delete(self, entry_id: bytes) -> None:
        """Deletes one entry, if it is there."""
        key = parse_id(entry_id)
        if self._fields.pop(key, None) is not None:
            del self._ids[bisect_left(self._ids, key)]

    def trim(self, min_id: bytes) -> None:
        """Deletes what lies before `min_id`."""
        self._drop_first(bisect_left(self._ids, parse_id(min_id)))

    def read_group(self, group: bytes, consumer: bytes, count: int, now_ms: int) -> list[c.Entry]:
        """Up to `count` entries that the group has not seen; they are pending until acknowledged."""
        state = self._groups.setdefault(group, _Group())
        first = bisect_right(self._ids, state.last_delivered)
        ids = self._ids[first : first + count]
        for entry_id in ids:
            state.pending[entry_id] = _Pending(consumer, now_ms)
            state.last_delivered = entry_id
        return self._entries(ids)

    def pending(self, group: bytes, consumer: bytes, count: int) -> list[c.Entry]:
        """Up to `count` entries that a consumer was given and nobody acknowledged."""
        pending = self._groups.setdefault(group, _Group()).pending
        ids = [entry_id for entry_id, delivery in pending.items() if delivery.consumer == consumer]
        return self._entries(entry_id for entry_id in ids[:count] if entry_id in self._fields)

    def reclaim(self, group: bytes, consumer: bytes, min_idle_ms: int, count: int, now_ms: int) -> list[c.Entry]:
        """Hands long pending entries to `consumer` and forgets deleted ones, `count` of both together."""
        pending = self._groups.setdefault(group, _Group()).pending
        ids: list[EntryId] = []
        for entry_id, delivery in list(pending.items()):
            if count == 0:
                break
            if entry_id not in self._fields:
                del pending[entry_id]
            elif now_ms - delivery.delivered_ms >= min_idle_ms:
                pending[entry_id] = _Pending(consumer, now_ms)
                ids.append(entry_id)
            else:
                continue
            count -= 1
        return self._entries(ids)

    def acknowledge(self, group: bytes, entry_id: bytes) -> None:
        """The group need not be given the entry again."""
        if state := self._groups.get(group):
            state.pending.pop(parse_id(entry_id), None)

    def _drop_first(self, num_entries: int) -> None:
        for entry_id in self._ids[:num_entries]:
            del self._fields[entry_id]
        del self._ids[:num_entries]

    def _entries(self, ids: Iterable[EntryId]) -> list[c.Entry]:
        return [c.Entry(format_id(entry_id), dict(self._fields[entry_id])) for entry_id in ids]


class MemoryStreams:
    """All streams of one pool. `now_ms` is the server's clock, for entry ids."""

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self._now_ms = now_ms
        self._streams: dict[bytes, MemoryStream] = {}

    def operations(self) -> dict[type[c.Call[Any]], Callable[[Any], Any]]:
        """What is done here, by call."""
        return {
            c.Append: lambda call: self.add(call.stream, call.fields, call.cap),
            c.Read: self._read,
            c.ReadGroup: self._read_group,
            c.Reclaim: self._reclaim,
            c.Acknowledge: lambda call: self.acknowledge(call.stream, call.group, call.entry_id),
            c.LastId: lambda call: self.get(call.stream).last_id,
            c.Length: lambda call: len(self.get(call.stream)),
            c.DropStream: lambda call: self.drop(call.stream),
        }

    def get(self, name: bytes) -> MemoryStream:
        """The stream of a name, made when missing."""
        stream = self._streams.get(name)
        if stream is None:
            stream = self._streams[bytes(name)] = MemoryStream()
        return stream

    def add(self, name: bytes, fields: Mapping[bytes, bytes], cap: int = 0) -> bytes:
        """Adds an entry to a stream and answers its id."""
        return self.get(name).add(fields, self._now_ms(), cap)

    def acknowledge(self, name: bytes, group: bytes, entry_id: bytes) -> None:
        """Acknowledges and deletes an entry."""
        self.get(name).acknowledge(group, entry_id)
        self.get(name).delete(entry_id)

    def drop(self, name: bytes) -> None:
        """Forgets a stream with its groups."""
        self._streams.pop(name, None)

    def _read(self, call: c.Read) -> dict[bytes, list[c.Entry]]:
        found = {bytes(name): self.get(name).read(behind, call.count) for name, behind in call.streams.items()}
        return {name: entries for name, entries in found.items() if entries}

    def _read_group(self, call: c.ReadGroup) -> list[c.Entry]:
        stream = self.get(call.stream)
        if call.pending:
            return stream.pending(call.group, call.consumer, call.count)
        return stream.read_group(call.group, call.consumer, call.count, self._now_ms())

    def _reclaim(self, call: c.Reclaim) -> list[c.Entry]:
        stream = self.get(call.stream)
        return stream.reclaim(call.group, call.consumer, call.min_idle_ms, call.count, self._now_ms())
