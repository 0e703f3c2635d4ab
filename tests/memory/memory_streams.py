"""Streams in memory: entries in order of their ids, consumer groups with what they have not acknowledged yet."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field

EntryId = tuple[int, int]  # milliseconds, sequence number
Fields = tuple[bytes, ...]  # names and values in turn


def parse_id(entry_id: bytes) -> EntryId:
    """The two numbers of `ms-seq`; `ms` alone means `ms-0`."""
    milliseconds, _, sequence = entry_id.partition(b"-")
    return int(milliseconds), int(sequence or 0)


def format_id(entry_id: EntryId) -> bytes:
    """`ms-seq`."""
    return b"%d-%d" % entry_id


@dataclass(slots=True)
class Group:
    """A consumer group: the last entry that it was given, and those that nobody acknowledged, in order of ids."""

    last_delivered: EntryId = (0, 0)
    pending: dict[EntryId, tuple[bytes, int]] = field(default_factory=dict)  # consumer, Unix milliseconds

    def copy(self) -> "Group":
        """The same, to be changed without this one."""
        return Group(self.last_delivered, self.pending.copy())


class Stream:
    """One stream; as `other` is, if one is given."""

    def __init__(self, other: "Stream | None" = None) -> None:
        self.last: EntryId = other.last if other is not None else (0, 0)  # of all that were ever added
        self.ids: list[EntryId] = other.ids.copy() if other is not None else []  # ascending
        self.entries: dict[EntryId, Fields] = other.entries.copy() if other is not None else {}
        self.groups: dict[bytes, Group] = (
            {name: each.copy() for name, each in other.groups.items()} if other is not None else {}
        )

    def __len__(self) -> int:
        return len(self.ids)

    def add(self, fields: Fields, now_ms: int) -> EntryId:
        """Adds an entry; its id is greater than every one before."""
        milliseconds, sequence = self.last
        self.last = (now_ms, 0) if now_ms > milliseconds else (milliseconds, sequence + 1)
        self.ids.append(self.last)
        self.entries[self.last] = fields
        return self.last

    def after(self, entry_id: EntryId, count: int | None = None) -> list[EntryId]:
        """Up to `count` ids that follow one."""
        first = bisect_right(self.ids, entry_id)
        return self.ids[first : None if count is None else first + count]

    def delete(self, entry_id: EntryId) -> bool:
        """Return whether there was such an entry."""
        if self.entries.pop(entry_id, None) is None:
            return False
        del self.ids[bisect_left(self.ids, entry_id)]
        return True

    def keep_last(self, count: int) -> int:
        """Deletes all entries but the newest ones, and counts them."""
        return self._drop(max(0, len(self.ids) - count))

    def keep_from(self, entry_id: EntryId) -> int:
        """Deletes the entries before an id, and counts them."""
        return self._drop(bisect_left(self.ids, entry_id))

    def _drop(self, count: int) -> int:
        for entry_id in self.ids[:count]:
            del self.entries[entry_id]
        del self.ids[:count]
        return count

    def deliver(self, group: Group, consumer: bytes, ids: Iterable[EntryId], now_ms: int) -> None:
        """Notes that a consumer was given entries."""
        for entry_id in ids:
            group.pending[entry_id] = (consumer, now_ms)
            group.last_delivered = max(group.last_delivered, entry_id)

    def idle(self, group: Group, min_idle_ms: int, count: int, now_ms: int) -> tuple[list[EntryId], list[EntryId]]:
        """Entries that are pending for long, and those that are gone, `count` of both together."""
        there: list[EntryId] = []
        gone: list[EntryId] = []
        for entry_id, (_, delivered_ms) in group.pending.items():
            if len(there) + len(gone) == count:
                break
            if entry_id not in self.entries:
                gone.append(entry_id)
            elif now_ms - delivered_ms >= min_idle_ms:
                there.append(entry_id)
        return there, gone
