"""The other ranks of a worker, of which none goes on without the rest."""

from collections.abc import Iterable

from contract.domain.errors import ErrorCode, PenstockError
from servicekit.bus.calls import SessionInfo, SessionKind

PATIENCE_S = 10.0  # a server that fails over, or a machine that stands still, takes leases of seconds away


class RankWatch:
    """Notices that another rank has ended: nobody in the pool has its name any more.

    A rank that is started again has a session only once all have met again, so that its name alone tells enough.

    Args:
        names: of the other ranks' sessions; each counts once the pool has told of it.
        patience_s: for how long one may be away.
    """

    def __init__(self, names: Iterable[str], patience_s: float = PATIENCE_S) -> None:
        self._names = frozenset(names)
        self._known: set[str] = set()
        self._away_since_s: dict[str, float] = {}  # as this rank was told
        self._patience_s = patience_s
        self._noted_s = float("-inf")

    def forgive(self) -> None:
        """Begin to wait anew: the server was away, and who was there is not known."""
        self._away_since_s.clear()

    def note(self, sessions: Iterable[SessionInfo], now_s: float) -> None:
        """Take over what a survey told; now_s: a clock that never goes back, in seconds, always the same one.

        Raises:
            PenstockError: INTERNAL: another rank has ended.
        """
        if now_s - self._noted_s > self._patience_s / 2:
            self.forgive()  # this rank itself stood still, perhaps with all others
        self._noted_s = now_s
        told = [each for each in sessions if each.kind is SessionKind.WORKER and each.name in self._names]
        self._known |= {each.name for each in told}
        away = self._known - {each.name for each in told if each.alive}
        self._away_since_s = {name: self._away_since_s.get(name, now_s) for name in away}
        gone = sorted(name for name, since_s in self._away_since_s.items() if now_s - since_s > self._patience_s)
        if gone:
            message = f"{', '.join(gone)} has ended: all ranks of a worker start again together"
            raise PenstockError(ErrorCode.INTERNAL, message)
