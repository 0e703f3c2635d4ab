"""The shards that a detokenizer should have, and what it has to ask for to get there."""

from collections.abc import Collection, Iterable

from servicekit.bus.calls import SessionInfo, SessionKind
from servicekit.status import is_draining

_REMEMBERED_S = 10.0  # a death after which nobody took anything was that of one without shards


class Deaths:
    """The times at which detokenizers that died were last heard of: their shards have waited since."""

    def __init__(self) -> None:
        self._alive: set[bytes] = set()
        self._heard_s: dict[bytes, float] = {}

    def note(self, sessions: Iterable[SessionInfo], now_s: float) -> None:
        """Takes over a survey."""
        detokenizers = [each for each in sessions if each.kind is SessionKind.DETOKENIZER]
        for each in detokenizers:
            if each.sid in self._alive and not each.alive and not each.left:
                self._heard_s[each.sid] = now_s - each.silent_ms / 1000
        self._heard_s = {sid: heard_s for sid, heard_s in self._heard_s.items() if now_s - heard_s < _REMEMBERED_S}
        self._alive = {each.sid for each in detokenizers if each.alive}

    def last_heard_s(self) -> float | None:
        """Of the one that is longest silent; None: nobody died lately."""
        return min(self._heard_s.values(), default=None)

    def settle(self) -> None:
        """Note that all that the dead held was taken."""
        self._heard_s.clear()


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
    """Return whether another detokenizer is there that stays."""
    return any(
        each.alive and each.kind is SessionKind.DETOKENIZER and each.sid != sid and not is_draining(each.status)
        for each in sessions
    )
