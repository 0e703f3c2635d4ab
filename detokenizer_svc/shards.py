"""The shards that one detokenizer has leased, and those of which it cannot know whether it has."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from detokenizer_svc import shard_claims
from detokenizer_svc.shard import Shard
from servicekit.bus.calls import Call, LeaseShard, ReleaseShard, SessionInfo


class LeasedShards:
    """They are served. One thread changes them; any may look at a copy."""

    def __init__(self, num_shards: int) -> None:
        """None is leased; the pool has so many."""
        self._num_shards = num_shards
        self._shards: dict[int, Shard] = {}
        self._share = 0
        # Asked for or given back by a call whose answer has not come: may be leased, and are not served.
        self.unsure: set[int] = set()
        self.has_successor = False  # another detokenizer that stays

    def __len__(self) -> int:
        return len(self._shards)

    def __iter__(self) -> Iterator[Shard]:
        return iter(list(self._shards.values()))

    @property
    def num_requests(self) -> int:
        """Requests that go on in them."""
        return sum(len(shard.detokenizer) for shard in self)

    def positions(self) -> dict[bytes, bytes]:
        """The streams to read, and after which entries."""
        positions: dict[bytes, bytes] = {}
        for shard in self._shards.values():
            positions[shard.log_stream] = shard.log_position
            positions[shard.attach_stream] = shard.attach_position
        return positions

    def routes(self) -> list[tuple[bytes, bytes]]:
        """The requests that go on in them, each with who gets its text."""
        return [each for shard in self._shards.values() for each in shard.detokenizer.routes()]

    def lengths(self) -> dict[int, tuple[int, int]]:
        """Entries and bytes of the logs, by shard."""
        return {shard.number: (shard.extent.num_entries, shard.extent.num_bytes) for shard in self}

    def add(self, shard: Shard) -> None:
        """Serve a shard that was leased."""
        self._shards[shard.number] = shard

    def drop(self, shard: Shard) -> None:
        """Serve a shard no more."""
        del self._shards[shard.number]

    def confirmations(self, sid: bytes) -> list[Call[Any]]:
        """The calls by which all leases are renewed, and shards let go that are not served."""
        leased = [
            LeaseShard(sid, shard.number, held=True, num_read=shard.extent.num_entries)
            for shard in self._shards.values()
        ]
        # A lease that lives and is not served would keep all others from the shard.
        return [*leased, *(ReleaseShard(sid, number) for number in sorted(self.unsure))]

    def confirm(self, answers: Sequence[Any]) -> list[Shard]:
        """Take the answers to `confirmations`; returns the shards whose leases are lost."""
        self.unsure.clear()
        return [shard for shard, has_lease in zip(self, answers, strict=False) if not has_lease]

    def note(self, sessions: Iterable[SessionInfo], sid: bytes) -> None:
        """Take over from a survey who else is there for the shards."""
        sessions = list(sessions)
        self.has_successor = shard_claims.has_successor(sessions, sid)
        self._share = shard_claims.fair_share(self._num_shards, sessions)

    def surplus(self) -> list[Shard]:
        """The shards to give back."""
        return [self._shards[number] for number in shard_claims.surplus(self._shards, self._share)]

    def wanted(self, sid: bytes) -> Iterator[int]:
        """The shards to try for, one after the other, until there are enough."""
        for number in shard_claims.candidates(self._shards, self._num_shards, sid):
            if len(self._shards) >= self._share:
                return
            yield number
