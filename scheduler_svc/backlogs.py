"""Detokenizers that are so far behind that nothing more is planned for them."""

from collections.abc import Iterable, Sequence

import structlog

_log = structlog.stdlib.get_logger(__name__)

ASK_NS = 250_000_000
ASK_AGAIN_NS = 50_000_000  # while one is behind


class Backlogs:
    """The number of entries of each shard's log that are not read yet, and the shards with more than `max_backlog`."""

    def __init__(self, max_backlog: int) -> None:
        self._max_backlog = max_backlog
        self._ask_ns = 0
        self.lengths: dict[int, int] = {}  # by shard, as far as they were asked for
        self.behind: frozenset[int] = frozenset()

    def is_due(self, now_ns: int) -> bool:
        """Return whether to ask again: monotonic nanoseconds."""
        if now_ns < self._ask_ns:
            return False
        self._ask_ns = now_ns + (ASK_AGAIN_NS if self.behind else ASK_NS)
        return True

    def note(self, shards: Sequence[int], lengths: Sequence[int]) -> None:
        """The answer; a shard that was not asked for writes no log for this scheduler."""
        self.lengths = dict(zip(shards, lengths, strict=True))
        behind = frozenset(shard for shard, length in self.lengths.items() if length > self._max_backlog)
        for shard in sorted(behind - self.behind):
            _log.warning("a detokenizer is behind: no steps for its shard", shard=shard, entries=self.lengths[shard])
        for shard in sorted(self.behind - behind):
            _log.info("a detokenizer has caught up", shard=shard)
        self.behind = behind

    def holds_up(self, shards: Iterable[int]) -> bool:
        """Return whether one of these shards is behind."""
        return not self.behind.isdisjoint(shards)
