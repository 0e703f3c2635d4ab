"""The others in the pool, as surveys tell of them: workers to pair with, and other schedulers."""

import time
from functools import partial

import structlog

from contract.domain.errors import PoisonMessageError
from scheduler_svc.claiming import ASK_AGAIN_NS
from scheduler_svc.core.models import Absences
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.intake import Intake
from scheduler_svc.metrics import Meters
from scheduler_svc.outbox import Outbox
from scheduler_svc.pairing import (
    PairedWorker,
    Pairings,
    dead_schedulers,
    gap_plan,
    has_died,
    is_bereft,
    is_waited_for,
    serves_elsewhere,
    staying_schedulers,
)
from scheduler_svc.shards import Shards
from scheduler_svc.wire import decode_worker_info, encode_plan, model_digest_of
from servicekit.bus import keys
from servicekit.bus.calls import (
    NOT_YET,
    UNWANTED,
    Commit,
    HandOver,
    ListShards,
    Pair,
    Pairing,
    SessionInfo,
    Settling,
    Strike,
    Struck,
    Surveyed,
    Take,
    Unpair,
    Unwanted,
    WorkerEntry,
)
from servicekit.roster import Roster

_log = structlog.stdlib.get_logger(__name__)

SURVEY_NS = 200_000_000
HAND_OVER_NS = 1_000_000_000  # without a worker that is paired, while another scheduler has one


class Neighbours:
    """Keeps this scheduler paired with its share of the workers, and requests with schedulers that can serve them."""

    def __init__(
        self,
        sid: bytes,
        scheduler: Scheduler,
        intake: Intake,
        *,
        shards: Shards,
        outbox: Outbox,
        meters: Meters,
        model_gone_s: float,
    ) -> None:
        """Nobody is known.

        Args:
            sid: the session.
            scheduler: plans for the paired workers.
            intake: loads what is taken over.
            shards: where is logged what ends here.
            outbox: where calls are put.
            meters: where is counted.
            model_gone_s: requests of a model that no worker anywhere has had for so long end with an error.
        """
        self.pairings = Pairings()
        self.is_leaving = False  # the requests are to be handed to others
        self._sid = sid
        self._model_gone_s = model_gone_s
        self._scheduler = scheduler
        self._intake = intake
        self._shards = shards
        self._outbox = outbox
        self._meters = meters
        self._roster = Roster()
        self._gone = Absences(round(model_gone_s * 1e9))  # from the pool
        self._elsewhere = Absences(HAND_OVER_NS)  # from this scheduler's workers
        self._survey_ns = self._linked_ns = 0
        self._is_draining = False

    def is_due(self, now_ns: int) -> bool:
        """Return whether it is time for a survey: monotonic nanoseconds."""
        return now_ns >= self._survey_ns

    def survey(self, now_ns: int, *, is_draining: bool) -> None:
        """Ask what has changed in the pool."""
        self._survey_ns, self._is_draining = now_ns + SURVEY_NS, is_draining
        self._outbox.put(self._roster.survey(), self._surveyed)
        self._outbox.put(ListShards(), self._shards.note_holders)

    def ask_again(self) -> None:
        """Ask for everything at once, after answers were lost."""
        self._roster.forget()
        self._survey_ns = 0

    def end_epoch(self, worker: str) -> None:
        """Let a worker's sequences wait again; it is told by the next survey and begins anew."""
        self._scheduler.remove_worker(worker)
        self.pairings.end(worker)
        self._survey_ns = 0

    def strike(self, link: PairedWorker) -> None:
        """Give strikes: what the worker was computing may be the reason why it is lost."""
        struck, rows = self._scheduler.strike(link.worker)
        self._meters.recoveries.lose("worker", link.heard_ns, [each.request_id for each in struck])
        self._shards.log(rows)
        if struck:
            told = tuple(Struck(each.request_id, each.num_strikes, each.struck_at) for each in struck)
            self._outbox.put(Strike(self._sid, told))

    def _surveyed(self, surveyed: Surveyed | None) -> None:
        now_s = time.monotonic()
        if surveyed is not None and any(each.sid == self._sid for each in surveyed.sessions):
            self._intake.expect()  # another scheduler may have handed requests over
        if not self._roster.note(surveyed, now_s):
            self._survey_ns = 0  # the rest of it
            return
        workers, sessions, now_ns = self._roster.workers(), self._roster.sessions(now_s), time.monotonic_ns()
        self._shards.note_workers(entry.worker for entry in workers if entry.alive)
        self._follow_workers(workers, sessions, now_ns)
        self._follow_schedulers(workers, sessions, now_ns)
        self._follow_models(workers, sessions, now_ns)

    # Workers.

    def _follow_workers(self, workers: list[WorkerEntry], sessions: list[SessionInfo], now_ns: int) -> None:
        """Let go of workers that are lost, and pair with those that are free."""
        sid = self._sid
        for name in self.pairings.lost(workers, sid):
            link = self.pairings.links[name]
            died = has_died(link.incarnation, sessions)
            _log.warning("lost a worker; its sequences go on elsewhere", worker=name, died=died)
            if died:
                self.strike(link)
            self._scheduler.remove_worker(name)
            self.pairings.end(name)
        for entry in self.pairings.to_end(workers, sid, now_ns):
            plan = encode_plan(gap_plan(), sid, entry.incarnation, time.time_ns())
            self._outbox.put(Commit(sid, (), entry.worker, plan))
        wanted = self.pairings.to_pair(workers, sessions, sid, now_ns)
        for name in wanted:
            self._outbox.put(Pair(sid, name), partial(self._paired, name))
        for name in set(self.pairings.unserved(workers, sid)).difference(wanted):
            self._outbox.put(Unpair(sid, name))
        if self.pairings.has_one_for_another(workers, sessions):
            idlest = min(self.pairings.links, key=lambda name: self._scheduler.workers[name].num_running)
            self._give_back(idlest, now_ns)

    def _give_back(self, worker: str, now_ns: int) -> None:
        _log.info("gave a worker to another scheduler", worker=worker)
        self._scheduler.remove_worker(worker)
        self.pairings.give_back(worker, now_ns)
        self._outbox.put(Unpair(self._sid, worker))

    def _paired(self, worker: str, pairing: Pairing | Unwanted | None) -> None:
        if pairing is UNWANTED:
            if self.pairings.put_off(worker, time.monotonic_ns()):
                _log.error("a worker is not taken in: the pool serves two other models already", worker=worker)
            return
        if pairing is None or worker in self.pairings.links or self.pairings.has_ended(pairing.incarnation):
            return
        try:
            offer = decode_worker_info(pairing.info)
        except PoisonMessageError as error:
            self._outbox.bury(f"worker:{worker}", {keys.PAYLOAD: pairing.info}, str(error))
            self.pairings.refuse(pairing.incarnation)
            return
        self.pairings.begin(PairedWorker(worker, pairing.incarnation, offer, pairing.results_after))
        self._shards.log(self._scheduler.add_worker(worker, offer.limits, offer.model_digest))
        self._intake.claiming.is_due = True
        digest, num_blocks = offer.model_digest.hex(), offer.limits.num_blocks
        _log.info("paired", worker=worker, model=offer.model, model_digest=digest, num_blocks=num_blocks)

    # Other schedulers.

    def _follow_schedulers(self, workers: list[WorkerEntry], sessions: list[SessionInfo], now_ns: int) -> None:
        """Take over from schedulers that have died, or leave to others what this one has no workers for."""
        sid = self._sid
        if self.pairings.links or not serves_elsewhere(workers, sid):
            self._linked_ns = now_ns
            for dead in () if self._is_draining else dead_schedulers(sessions, sid):
                since_ns = now_ns - dead.silent_ms * 1_000_000
                self._outbox.put(Take(sid, dead.sid), partial(self._taken, since_ns))
        elif self._scheduler.requests and (is_bereft(workers, sid) or now_ns - self._linked_ns > HAND_OVER_NS):
            _log.warning("no worker is left for this scheduler: handing its requests to others")
            self.is_leaving = True
        self.is_leaving |= self._is_draining and is_waited_for(workers, sessions, sid)

    def _taken(self, since_ns: int, request_ids: list[bytes] | Settling | None) -> None:
        if request_ids is NOT_YET:
            self._survey_ns = time.monotonic_ns() + ASK_AGAIN_NS
            return
        if request_ids:
            self._meters.recoveries.lose("scheduler", since_ns, request_ids)
            _log.info("took requests over", count=len(request_ids))
            self._intake.load(request_ids)

    def _follow_models(self, workers: list[WorkerEntry], sessions: list[SessionInfo], now_ns: int) -> None:
        """Hand over or end the requests whose model no worker of this scheduler has."""
        wanted = self._scheduler.models
        living = {entry: model_digest_of(entry) for entry in workers if entry.alive} if wanted else {}
        present = {each for each in living.values() if each is not None}
        for model_digest in self._gone.note(wanted, present, now_ns):
            _log.error("requests end: no worker has their model any more", model_digest=model_digest.hex())
            self._shards.log(self._scheduler.abandon(model_digest, self._model_gone_s))
        here = {link.offer.model_digest for link in self.pairings.links.values()}
        others = staying_schedulers(sessions) - {self._sid}
        for model_digest in self._elsewhere.note(wanted, here, now_ns):
            owners = [entry.owner for entry, model in living.items() if model == model_digest and entry.owner in others]
            if owners and owners[0] is not None:
                self._hand_over(model_digest, owners[0])

    def _hand_over(self, model_digest: bytes, receiver: bytes) -> None:
        request_ids = tuple(self._scheduler.requests.of_model(model_digest))
        _log.info("hands requests to another scheduler, whose workers have their model", count=len(request_ids))
        self._scheduler.hand_over(request_ids)
        self._outbox.put(HandOver(self._sid, receiver, request_ids), partial(self._handed_over, request_ids))

    def _handed_over(self, request_ids: tuple[bytes, ...], gone: list[bytes]) -> None:
        """Load again the requests that the other scheduler did not get, since it has died."""
        if left := [each for each in request_ids if each not in set(gone)]:
            self._intake.load(left)
