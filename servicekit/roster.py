"""The members of a pool, kept up to date by surveys, which tell what has changed."""

from dataclasses import replace

from servicekit.bus.calls import RegisteredWorker, SessionInfo, Survey, Surveyed, WorkerEntry


class Roster:
    """All sessions and workers, as of the last survey. Begun anew after the connection was lost.

    A server that was restarted may have lost the last changes, and count others with the same generations.
    """

    def __init__(self) -> None:
        self._generation = 0
        self._sessions: dict[bytes, tuple[SessionInfo, float]] = {}  # and when it was told
        self._workers: dict[str, RegisteredWorker] = {}

    def forget(self) -> None:
        """Nothing is known any more: the next survey tells everything."""
        self.__init__()  # type: ignore[misc]

    def survey(self) -> Survey:
        """The call to make now."""
        return Survey(self._generation)

    def note(self, surveyed: Surveyed | None, now_s: float) -> bool:
        """Takes over an answer. False: it is only a part, and the next survey is to be made before anybody acts on it.

        Args:
            surveyed: the answer.
            now_s: a clock that never goes back, in seconds; always the same one.
        """
        if surveyed is None:
            return True
        if surveyed.is_whole:
            self._sessions, self._workers = {}, {}
        self._generation = surveyed.generation
        self._sessions |= {each.sid: (each, now_s) for each in surveyed.sessions}
        self._workers |= {each.worker: each for each in surveyed.workers}
        for sid in surveyed.gone_sessions:
            self._sessions.pop(sid, None)
        for name in surveyed.gone_workers:
            self._workers.pop(name, None)
        return surveyed.is_last

    def sessions(self, now_s: float) -> list[SessionInfo]:
        """All of them by id, as `ListSessions` tells, but for what they own and the figures of their statuses."""
        return [
            replace(each, silent_ms=each.silent_ms + int((now_s - told_s) * 1000))
            for _, (each, told_s) in sorted(self._sessions.items())
        ]

    def workers(self) -> list[WorkerEntry]:
        """All of them by name, as `ListWorkers` tells."""
        return [
            WorkerEntry(
                each.worker,
                each.incarnation,
                self._lives(each.incarnation),
                each.info,
                each.owner if self._lives(each.owner) else None,
            )
            for _, each in sorted(self._workers.items())
        ]

    def _lives(self, sid: bytes | None) -> bool:
        return sid in self._sessions and self._sessions[sid][0].alive
