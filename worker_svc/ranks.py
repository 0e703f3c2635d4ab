"""The other ranks of a worker, of which none goes on without the rest."""

from collections.abc import Iterable

from contract.domain.errors import ErrorCode, PenstockError
from servicekit.bus.calls import SessionInfo


class RankWatch:
    """Notices that another rank has ended: nobody in the pool has its name any more.

    A rank that is started again has a session only once all have met again, so that its name alone tells enough.

    Args:
        names: of the other ranks' sessions, which are all there.
        patience_s: for how long one may be away, as after a restart of the server.
        now_s: a clock that never goes back, in seconds; always the same one.
    """

    def __init__(self, names: Iterable[str], patience_s: float, now_s: float) -> None:
        self._seen_s = dict.fromkeys(names, now_s)  # when each was last alive
        self._patience_s = patience_s

    def forgive(self, now_s: float) -> None:
        """Begin to wait anew: the server was away, and who was there is not known."""
        self._seen_s = dict.fromkeys(self._seen_s, now_s)

    def note(self, sessions: Iterable[SessionInfo], now_s: float) -> None:
        """Take over what a survey told.

        Raises:
            PenstockError: INTERNAL: another rank has ended.
        """
        self._seen_s |= {each.name: now_s for each in sessions if each.alive and each.name in self._seen_s}
        gone = [name for name, seen_s in self._seen_s.items() if now_s - seen_s > self._patience_s]
        if gone:
            message = f"{', '.join(gone)} has ended: all ranks of a worker start again together"
            raise PenstockError(ErrorCode.INTERNAL, message)
