"""Streams in memory: entries in order of their ids, consumer groups with what they have not acknowledged yet."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from servicekit.bus.calls import Entry

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

    def read(self, behind: bytes, count: int) -> list[Entry]:
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

    def read_group(self, group: bytes, consumer: bytes, count: int, now_ms: int) -> list[Entry]:
        """Up to `count` entries that the group has not seen; they are pending until acknowledged."""
        state = self._groups.setdefault(group, _Group())
        first = bisect_right(self._ids, state.last_delivered)
        ids = self._ids[first : first + count]
        for entry_id in ids:
            state.pending[entry_id] = _Pending(consumer, now_ms)
            state.last_delivered = entry_id
        return self._entries(ids)

    def reclaim(self, group: bytes, consumer: bytes, min_idle_ms: int, count: int, now_ms: int) -> list[Entry]:
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

    def _entries(self, ids: Iterable[EntryId]) -> list[Entry]:
        return [Entry(format_id(entry_id), dict(self._fields[entry_id])) for entry_id in ids]
