"""The server's commands for streams, as far as the bus uses them. None waits: who wants to asks again."""

from hiredis import ReplyError
from memory_commands import unknown
from memory_store import Reply, Store
from memory_streams import EntryId, Group, Stream, format_id, parse_id


class Streams:
    """Streams and consumer groups."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.appended: set[bytes] = set()  # streams that got entries

    def xadd(self, key: bytes, *words: bytes) -> Reply:
        """`*` comes before the fields; before that, if anything, how the stream is trimmed, exactly."""
        first = words.index(b"*") + 1
        stream = self._store.made(key, Stream)
        self.appended.add(key)
        entry_id = stream.add(words[first:], self._store.now_ms())
        match words[: first - 1]:
            case (b"MAXLEN", b"~", limit):
                stream.keep_last(int(limit))
            case (b"MINID", b"~", limit):
                stream.keep_from(parse_id(limit))
            case (_, *_):
                raise unknown(words)
        return format_id(entry_id)

    def xtrim(self, key: bytes, how: bytes, limit: bytes) -> Reply:
        if how != b"MINID":
            raise unknown((how, limit))
        return self._store.made(key, Stream).keep_from(parse_id(limit)) if self._store.find(key, Stream) else 0

    def xlen(self, key: bytes) -> Reply:
        return len(self._store.find(key, Stream) or ())

    def xdel(self, key: bytes, *ids: bytes) -> Reply:
        if not self._store.find(key, Stream):
            return 0
        stream = self._store.made(key, Stream)
        return sum(stream.delete(parse_id(each)) for each in ids)

    def xrange(self, key: bytes, *words: bytes) -> Reply:
        """`- +`: all, or the first with `COUNT n`."""
        stream = self._store.find(key, Stream) or Stream()
        match words:
            case (b"-", b"+"):
                return _told(stream, stream.ids)
            case (b"-", b"+", b"COUNT", count):
                return _told(stream, stream.ids[: int(count)])
        raise unknown(words)

    def xinfo(self, _: bytes, key: bytes) -> Reply:
        stream = self._store.find(key, Stream)
        if stream is None:
            raise ReplyError("ERR no such key")
        return [b"length", len(stream), b"last-generated-id", format_id(stream.last)]

    def xread(self, *words: bytes) -> Reply:
        """`COUNT n [BLOCK ms] STREAMS`."""
        first = words.index(b"STREAMS") + 1
        middle = (first + len(words)) // 2
        found: list[Reply] = []
        for key, after in zip(words[first:middle], words[middle:], strict=True):
            stream = self._store.find(key, Stream)
            if stream and (ids := stream.after(parse_id(after), int(words[1]))):
                found.append([key, _told(stream, ids)])
        return found or None

    def xgroup(self, _create: bytes, key: bytes, name: bytes, _from: bytes, _mkstream: bytes) -> Reply:
        """`CREATE … 0 MKSTREAM`."""
        groups = self._store.made(key, Stream).groups
        if name in groups:
            raise ReplyError("BUSYGROUP Consumer Group name already exists")
        groups[name] = Group()
        return "OK"

    def xreadgroup(self, *words: bytes) -> Reply:
        """`GROUP name consumer COUNT n [BLOCK ms] STREAMS key`, and `>`: new entries; `0`: pending ones."""
        name, consumer, count, key, position = words[1], words[2], int(words[4]), words[-2], words[-1]
        stream, group = self._group(key, name)
        if position == b">":
            ids = stream.after(group.last_delivered, count)
            stream.deliver(group, consumer, ids, self._store.now_ms())
            return [[key, _told(stream, ids)]] if ids else None
        mine = [each for each, (whose, _) in group.pending.items() if whose == consumer]
        return [[key, _told(stream, mine[:count])]]

    def xautoclaim(self, *words: bytes) -> Reply:
        """`key name consumer min-idle 0-0 COUNT n`."""
        key, name, consumer, min_idle_ms, _, _, count = words
        stream, group = self._group(key, name)
        now_ms = self._store.now_ms()
        ids, gone = stream.idle(group, int(min_idle_ms), int(count), now_ms)
        stream.deliver(group, consumer, ids, now_ms)
        for entry_id in gone:
            del group.pending[entry_id]
        return [b"0-0", _told(stream, ids), list(map(format_id, gone))]

    def xack(self, key: bytes, name: bytes, *ids: bytes) -> Reply:
        stream = self._store.find(key, Stream)
        if stream is None or name not in stream.groups:
            return 0
        pending = self._store.made(key, Stream).groups[name].pending
        return sum(pending.pop(parse_id(each), None) is not None for each in ids)

    def _group(self, key: bytes, name: bytes) -> tuple[Stream, Group]:
        stream = self._store.find(key, Stream)
        if stream is None or name not in stream.groups:
            raise ReplyError(f"NOGROUP No such key {key!r} or consumer group {name!r}")
        stream = self._store.made(key, Stream)
        return stream, stream.groups[name]


def _told(stream: Stream, ids: list[EntryId]) -> Reply:
    """Entries with their fields; with nothing, where they were deleted while they were pending."""
    return [[format_id(each), None if (entry := stream.entries.get(each)) is None else list(entry)] for each in ids]
