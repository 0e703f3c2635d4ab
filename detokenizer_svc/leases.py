"""Which shards a detokenizer should have, and what it has to ask for to get there."""

from collections.abc import Collection, Iterable

from detokenizer_svc import wire
from servicekit.bus.calls import SessionInfo, SessionKind


def fair_share(num_shards: int, sessions: Iterable[SessionInfo]) -> int:
    """Shards that one detokenizer takes at most, so that all of them have one and none more than it must."""
    alive = sum(1 for session in sessions if session.alive and session.kind is SessionKind.DETOKENIZER)
    return -(-num_shards // max(1, alive))


def surplus(held: Collection[int], share: int) -> list[int]:
    """Shards to give back: the highest ones beyond the share."""
    return sorted(held)[share:]


def candidates(held: Collection[int], num_shards: int, sid: bytes) -> list[int]:
    """Shards to try for, beginning somewhere else in every process so that they do not all try the same."""
    start = int.from_bytes(sid[:4], "big") % num_shards
    order = [(start + i) % num_shards for i in range(num_shards)]
    return [shard for shard in order if shard not in held]


def has_successor(sessions: Iterable[SessionInfo], sid: bytes) -> bool:
    """Whether another detokenizer is there that stays."""
    return any(
        each.alive and each.kind is SessionKind.DETOKENIZER and each.sid != sid and not wire.is_draining(each.status)
        for each in sessions
    )
