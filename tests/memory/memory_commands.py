"""The server's commands for strings, hashes, sets and sorted sets, as far as the pool's functions use them."""

from hiredis import ReplyError
from memory_store import Hash, Reply, Set, SortedSet, Store


def unknown(options: tuple[bytes, ...]) -> ReplyError:
    """A refusal of what the bus has never asked for."""
    return ReplyError(f"ERR not known to a server in memory: {options}")


def written(number: float) -> bytes:
    """A number as the server writes it."""
    return b"%d" % number if number.is_integer() else b"%.17g" % number


class Keys:
    """Keys of any type, and strings."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def exists(self, key: bytes) -> Reply:
        return int(self._store.exists(key))

    def unlink(self, *keys: bytes) -> Reply:
        return sum(map(self._store.delete, keys))

    del_ = unlink

    def pexpire(self, key: bytes, ms: bytes) -> Reply:
        return int(self._store.expire(key, int(ms)))

    def expire(self, key: bytes, seconds: bytes) -> Reply:
        return int(self._store.expire(key, 1000 * int(seconds)))

    def get(self, key: bytes) -> Reply:
        return self._store.find(key, bytes)

    def set(self, key: bytes, value: bytes, *options: bytes) -> Reply:
        self._store.put(key, value)
        match options:
            case (b"PX", ms):
                self._store.expire(key, int(ms))
            case (_, *_):
                raise unknown(options)
        return "OK"


class Hashes:
    """Hashes."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def hset(self, key: bytes, *pairs: bytes) -> Reply:
        fields = self._store.made(key, Hash)
        before = len(fields)
        fields.update(zip(pairs[::2], pairs[1::2], strict=True))
        return len(fields) - before

    def hget(self, key: bytes, field: bytes) -> Reply:
        fields = self._store.find(key, Hash)
        return fields.get(field) if fields else None

    def hmget(self, key: bytes, *names: bytes) -> Reply:
        fields = self._store.find(key, Hash) or Hash()
        return [fields.get(name) for name in names]

    def hgetall(self, key: bytes) -> Reply:
        return [part for pair in (self._store.find(key, Hash) or {}).items() for part in pair]

    def hexists(self, key: bytes, field: bytes) -> Reply:
        return int(field in (self._store.find(key, Hash) or ()))

    def hdel(self, key: bytes, *names: bytes) -> Reply:
        if not self._store.find(key, Hash):
            return 0
        fields = self._store.made(key, Hash)
        num_deleted = sum(fields.pop(name, None) is not None for name in names)
        self._store.delete_if_empty(key)
        return num_deleted

    def hincrby(self, key: bytes, field: bytes, by: bytes) -> Reply:
        fields = self._store.made(key, Hash)
        after = int(fields.get(field, 0)) + int(by)
        fields[field] = b"%d" % after
        return after


class Sets:
    """Sets."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def sadd(self, key: bytes, *members: bytes) -> Reply:
        known = self._store.made(key, Set)
        before = len(known)
        known.update(members)
        return len(known) - before

    def srem(self, key: bytes, *members: bytes) -> Reply:
        if not self._store.find(key, Set):
            return 0
        known = self._store.made(key, Set)
        before = len(known)
        known.difference_update(members)
        num_removed = before - len(known)
        self._store.delete_if_empty(key)
        return num_removed

    def smove(self, source: bytes, target: bytes, member: bytes) -> Reply:
        if not self.srem(source, member):
            return 0
        self.sadd(target, member)
        return 1

    def scard(self, key: bytes) -> Reply:
        return len(self._store.find(key, Set) or ())

    def sismember(self, key: bytes, member: bytes) -> Reply:
        return int(member in (self._store.find(key, Set) or ()))

    def smembers(self, key: bytes) -> Reply:
        return sorted(self._store.find(key, Set) or ())


class SortedSets:
    """Sorted sets."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def zadd(self, key: bytes, *pairs: bytes) -> Reply:
        scores = self._store.made(key, SortedSet)
        before = len(scores)
        scores.update(zip(pairs[1::2], map(float, pairs[::2]), strict=True))
        return len(scores) - before

    def zrem(self, key: bytes, *members: bytes) -> Reply:
        if not self._store.find(key, SortedSet):
            return 0
        scores = self._store.made(key, SortedSet)
        num_removed = sum(scores.pop(member, None) is not None for member in members)
        self._store.delete_if_empty(key)
        return num_removed

    def zrange(self, key: bytes, first: bytes, last: bytes, *options: bytes) -> Reply:
        """By rank, or `BYLEX LIMIT 0 count` from a member on, which then is the only order."""
        ordered = self._ordered(key)
        match options:
            case (b"BYLEX", b"LIMIT", b"0", count) if last == b"+":
                after = b"" if first == b"-" else first.removeprefix(b"(")
                return [member for _, member in ordered if member > after][: int(count)]
            case () | (b"WITHSCORES",):
                return _told(ordered[int(first) : int(last) + 1 or None], bool(options))
        raise unknown(options)

    def zrangebyscore(self, key: bytes, low: bytes, high: bytes, *options: bytes) -> Reply:
        """`LIMIT` comes last; `(` before the lower score excludes it."""
        lowest, highest, is_open = float(low.removeprefix(b"(")), float(high), low.startswith(b"(")
        found = [each for each in self._ordered(key) if lowest <= each[0] <= highest]
        found = [each for each in found if not (is_open and each[0] == lowest)]
        match options:
            case (b"LIMIT", first, count) | (b"WITHSCORES", b"LIMIT", first, count):
                return _told(found[int(first) : int(first) + int(count)], b"WITHSCORES" in options)
        raise unknown(options)

    def _ordered(self, key: bytes) -> list[tuple[float, bytes]]:
        return sorted((score, member) for member, score in (self._store.find(key, SortedSet) or {}).items())


def _told(found: list[tuple[float, bytes]], with_scores: bool) -> Reply:
    if with_scores:
        return [part for score, member in found for part in (member, written(score))]
    return [member for _, member in found]
