"""The workers that this scheduler is paired with, and the ends of epochs.

An epoch is a pair (scheduler session, worker incarnation). It is never begun twice: a worker whose epoch this side has
ended is sent a plan that leaves a gap, draws a new incarnation and registers again.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from contract.domain.plan import StepPlan
from scheduler_svc.core.pacing import Pacing
from scheduler_svc.wire import WorkerOffer
from servicekit.bus.calls import SessionInfo, SessionKind, WorkerEntry
from servicekit.status import is_draining

GAP_STEP = 2**62  # no plan of an epoch gets here, so that a worker which reads it has missed one
_REPEAT_NS = 2 * 10**9


@dataclass(slots=True)
class PairedWorker:
    """One worker in one epoch."""

    worker: str
    incarnation: bytes
    offer: WorkerOffer
    position: bytes  # entry of `results:{worker}` that was read last
    heard_ns: int = field(default_factory=time.monotonic_ns)  # when its last result came, or the epoch began
    pacing: Pacing = field(default_factory=Pacing)


class Pairings:
    """The links, and what a survey of the pool says about them."""

    def __init__(self) -> None:
        self.links: dict[str, PairedWorker] = {}
        self._ended: dict[bytes, int] = {}  # incarnations whose epoch is over → when they were last told
        self._put_off: dict[str, int] = {}  # workers that the pool does not take in → when to ask again
        self.is_worker_alive = True  # whether the pool has any; until it was surveyed, it may

    def begin(self, link: PairedWorker) -> None:
        """An epoch begins."""
        self._put_off.pop(link.worker, None)
        self.links[link.worker] = link

    def end(self, worker: str) -> None:
        """An epoch is over, whatever its worker may still send."""
        self._ended[self.links.pop(worker).incarnation] = 0

    def give_back(self, worker: str, now_ns: int) -> None:
        """As `end`, for a worker that another scheduler will pair with: it need not be told, unless nobody does."""
        self._ended[self.links.pop(worker).incarnation] = now_ns

    def refuse(self, incarnation: bytes) -> None:
        """Do not pair with this incarnation: it cannot be worked with, and telling it would not change that."""
        self._ended[incarnation] = 2**63

    def put_off(self, worker: str, now_ns: int) -> bool:
        """Ask again later: the pool has other models. True: this is the first time."""
        is_new = worker not in self._put_off
        self._put_off[worker] = now_ns + _REPEAT_NS
        return is_new

    def has_ended(self, incarnation: bytes) -> bool:
        """Return whether the epoch of this incarnation is over."""
        return incarnation in self._ended

    def lost(self, workers: Iterable[WorkerEntry], sid: bytes) -> list[str]:
        """The paired workers that are dead, another's, or began anew."""
        known = {entry.worker: entry for entry in workers}
        return [name for name, link in self.links.items() if not _belongs(known.get(name), link, sid)]

    def to_end(self, workers: Iterable[WorkerEntry], sid: bytes, now_ns: int) -> list[WorkerEntry]:
        """The workers that live on in an epoch which is over and must be told (again)."""
        told = []
        for entry in workers:
            ended_ns = self._ended.get(entry.incarnation)
            is_ours = entry.alive and entry.owner in (None, sid)
            if is_ours and ended_ns is not None and now_ns - ended_ns >= _REPEAT_NS:
                self._ended[entry.incarnation] = now_ns
                told.append(entry)
        known = {entry.incarnation for entry in workers}
        self._ended = {incarnation: when for incarnation, when in self._ended.items() if incarnation in known}
        return told

    def to_pair(self, workers: list[WorkerEntry], sessions: list[SessionInfo], sid: bytes, now_ns: int) -> list[str]:
        """The free workers to pair with now: no more than this scheduler's share of all that live."""
        living = [entry for entry in workers if entry.alive]
        self.is_worker_alive = bool(living)
        staying = staying_schedulers(sessions)
        if staying and sid not in staying:
            return []
        share = _share(living, staying)
        names = {entry.worker for entry in living}
        self._put_off = {name: when_ns for name, when_ns in self._put_off.items() if name in names}
        free = [
            entry.worker
            for entry in living
            if entry.worker not in self.links
            and entry.owner in (None, sid)
            and not self.has_ended(entry.incarnation)
            and self._put_off.get(entry.worker, 0) <= now_ns
        ]
        return free[: max(0, share - len(self.links))]

    def unserved(self, workers: Iterable[WorkerEntry], sid: bytes) -> list[str]:
        """The living workers that the pool says are this scheduler's: the answer to their pairing was lost."""
        return [
            entry.worker
            for entry in workers
            if entry.alive
            and entry.owner == sid
            and entry.worker not in self.links
            and not self.has_ended(entry.incarnation)
        ]

    def has_one_for_another(self, workers: list[WorkerEntry], sessions: list[SessionInfo]) -> bool:
        """Return whether a scheduler that stays has no worker, while this one has more than its share."""
        living, staying = [entry for entry in workers if entry.alive], staying_schedulers(sessions)
        is_one_without = bool(staying - {entry.owner for entry in living})
        return is_one_without and len(self.links) > _share(living, staying)


def staying_schedulers(sessions: Iterable[SessionInfo]) -> set[bytes]:
    """The living sessions of schedulers that are not about to end."""
    schedulers = (each for each in sessions if each.alive and each.kind is SessionKind.SCHEDULER)
    return {each.sid for each in schedulers if not is_draining(each.status)}


def _share(living: list[WorkerEntry], staying: set[bytes]) -> int:
    return -(-len(living) // max(1, len(staying)))


def is_bereft(workers: Iterable[WorkerEntry], sid: bytes) -> bool:
    """Return whether all workers that live are others': there is none to wait for."""
    living = [entry for entry in workers if entry.alive]
    return bool(living) and all(entry.owner not in (None, sid) for entry in living)


def serves_elsewhere(workers: Iterable[WorkerEntry], sid: bytes) -> bool:
    """Return whether another scheduler has a worker that lives."""
    return any(entry.alive and entry.owner not in (None, sid) for entry in workers)


def is_waited_for(workers: Iterable[WorkerEntry], sessions: Iterable[SessionInfo], sid: bytes) -> bool:
    """Return whether somebody could go on at once with what a draining scheduler holds, and only lacks its workers."""
    successors = staying_schedulers(sessions) - {sid}
    return bool(successors) and not any(entry.alive and entry.owner in successors for entry in workers)


def has_died(incarnation: bytes, sessions: Iterable[SessionInfo]) -> bool:
    """Return whether a worker's session has run out, other than by leaving in order."""
    session = next((session for session in sessions if session.sid == incarnation), None)
    return session is None or not (session.alive or session.left)


def gap_plan() -> StepPlan:
    """A plan that no epoch can have reached: it ends the epoch of the worker that reads it."""
    return StepPlan(step=GAP_STEP)


def dead_schedulers(sessions: list[SessionInfo], sid: bytes) -> list[SessionInfo]:
    """The sessions whose requests and workers can be taken over."""
    return [s for s in sessions if s.kind is SessionKind.SCHEDULER and not s.alive and s.sid != sid]


def _belongs(entry: WorkerEntry | None, link: PairedWorker, sid: bytes) -> bool:
    return entry is not None and entry.alive and entry.incarnation == link.incarnation and entry.owner == sid
