"""The part of a shard's log that is kept, for whom, and when that is too much."""

from dataclasses import dataclass

# Compacting may write so many bytes of checkpoints for each byte of log that it drops: long requests are written anew
# each time, so a log beside them may grow with them.
_MAX_WRITTEN_PER_DROPPED = 4


@dataclass(frozen=True, slots=True)
class LogLimits:
    """The length that the log may have for live requests, until they get checkpoints instead."""

    num_entries: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class LogMark:
    """A place between two entries of a log, and how much was read before it."""

    min_id: bytes  # of the entries after it
    num_entries: int = 0
    num_bytes: int = 0


_START = LogMark(b"0-0")


@dataclass(frozen=True, slots=True)
class Compaction:
    """A shortening of a log: checkpoints of these requests, then everything before a place may be dropped."""

    before: LogMark
    request_ids: tuple[bytes, ...] = ()


class LogExtent:
    """One log: what was read of it, the entry from which each live request needs it, and that from which it is kept."""

    def __init__(self) -> None:
        self._entry_id = b""  # the last one that was read
        self._num_entries = 0  # read, from the first on
        self._num_bytes = 0
        self._num_last_bytes = 0  # of the last entry
        self._kept = _START
        self._needed: dict[bytes, LogMark] = {}  # by live request; the marks ascend
        self._num_written = 0  # bytes of the last checkpoints

    @property
    def num_entries(self) -> int:
        """Entries that the log has, up to the last one read."""
        return self._num_entries - self._kept.num_entries

    @property
    def num_bytes(self) -> int:
        """Bytes of names and values in them."""
        return self._num_bytes - self._kept.num_bytes

    def read(self, entry_id: bytes, num_bytes: int) -> None:
        """The log's next entry was read."""
        self._entry_id, self._num_last_bytes = entry_id, num_bytes
        self._num_entries += 1
        self._num_bytes += num_bytes

    def open(self, request_id: bytes) -> None:
        """The last entry that was read opens a request."""
        self._needed[request_id] = LogMark(
            self._entry_id, self._num_entries - 1, self._num_bytes - self._num_last_bytes
        )

    def restore(self, request_id: bytes) -> None:
        """A request has a checkpoint, and the log, of which nothing was read yet, has what came after that."""
        self._needed[request_id] = _START

    def close(self, request_id: bytes) -> None:
        """A request has ended: it needs nothing any more."""
        self._needed.pop(request_id, None)

    def is_long(self, limits: LogLimits) -> bool:
        """Return whether live requests need more of the log than the limits allow, and checkpoints would cost less."""
        if not self._needed:
            return False
        oldest = next(iter(self._needed.values()))
        num_entries, num_bytes = self._num_entries - oldest.num_entries, self._num_bytes - oldest.num_bytes
        is_over = num_entries > limits.num_entries or num_bytes > limits.num_bytes
        return is_over and num_bytes * _MAX_WRITTEN_PER_DROPPED >= self._num_written

    def compaction(self, limits: LogLimits) -> Compaction | None:
        """The shortening that the log needs now; None: it has only what is needed."""
        if self.is_long(limits):
            return Compaction(self._end(), tuple(self._needed))
        oldest = next(iter(self._needed.values()), None) or self._end()
        return Compaction(oldest) if oldest.num_entries > self._kept.num_entries else None

    def compacted(self, compaction: Compaction, num_written: int) -> None:
        """A compaction of this moment was carried out.

        Args:
            compaction: as `compaction` gave it, with nothing read since.
            num_written: bytes of its checkpoints.
        """
        self._kept = compaction.before
        if compaction.request_ids:
            self._num_written = num_written
            self._needed = dict.fromkeys(compaction.request_ids, compaction.before)

    def _end(self) -> LogMark:
        """The place after the last entry."""
        if not self._num_entries:
            return _START
        milliseconds, _, number = self._entry_id.partition(b"-")
        return LogMark(b"%s-%d" % (milliseconds, int(number) + 1), self._num_entries, self._num_bytes)
