"""Between bus and core: results become rows and plans, which become calls to the bus."""

import time
from collections.abc import Mapping
from functools import partial

import structlog

from contract.domain.errors import ErrorCode, PoisonMessageError
from contract.domain.finish import CancelReason
from contract.domain.request import format_request_id
from contract.domain.rows import unstarted_rows
from contract.domain.timeline import Computed
from scheduler_svc.backlogs import Backlogs
from scheduler_svc.core.planned_steps import StepError
from scheduler_svc.core.rows import cancel_error
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.intake import Intake
from scheduler_svc.looks import Looks
from scheduler_svc.metrics import Meters
from scheduler_svc.neighbours import Neighbours
from scheduler_svc.outbox import Outbox
from scheduler_svc.pairing import PairedWorker, Pairings
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.shards import Shards
from scheduler_svc.wire import decode_cancel, decode_result, encode_plan, encode_rows, num_samples
from servicekit.bus import keys
from servicekit.bus.calls import Claim, Entry, LogBacklogs, Overdue, Reject, StoredRequest
from servicekit.bus.keys import Keys
from servicekit.bus.replies import number
from servicekit.logs import is_debugging

_log = structlog.stdlib.get_logger(__name__)

OVERDUE_COUNT = 64


class Dispatcher:
    """All that belongs to one session: it is begun anew when the session is lost."""

    def __init__(self, settings: SchedulerSettings, names: Keys, sid: bytes, meters: Meters) -> None:
        self.sid = sid
        self.scheduler = Scheduler(settings.scheduling)
        self.outbox = Outbox(names, meters)
        self.is_filling = False  # more plans may follow those that were just made
        self.due_ns = 0  # when the next plan is made that waits for its time, monotonic; 0: none does
        self.is_gathering = False  # a plan waits for requests that are on their way
        self._looks = Looks()
        self._looked_ns = 0  # when the look of this turn began, monotonic; 0: there was none
        self._window = settings.plans_in_flight
        self._backlogs = Backlogs(settings.max_log_backlog)
        self._keys = names
        self._meters = meters
        self._shards = Shards(sid, settings.num_shards)
        self._intake = Intake(sid, self.scheduler, self._shards, self.outbox, meters)
        self._neighbours = Neighbours(
            sid,
            self.scheduler,
            self._intake,
            shards=self._shards,
            outbox=self.outbox,
            meters=meters,
            model_gone_s=settings.model_gone_s,
        )
        self._positions = {names.requests: b"0-0", names.cancels: b"0-0"}
        self._begun_ns = time.time_ns()

    @property
    def pairings(self) -> Pairings:
        """The workers that it is paired with."""
        return self._neighbours.pairings

    @property
    def is_leaving(self) -> bool:
        """Return whether the requests are to be handed to others."""
        return self._neighbours.is_leaving

    @property
    def is_done(self) -> bool:
        """Return whether no request is held and everything was told."""
        return not self.scheduler.requests and not self.outbox.pending and not self._shards.has_rows

    def send_again(self) -> None:
        """After answers were lost: send what must arrive, and look for what a claim or a take may have brought."""
        self.outbox.drop_questions()
        self._looked_ns = 0
        self._intake.ask_again()
        self._neighbours.ask_again()

    def plan(self) -> None:
        """Expire what is late, fill every worker's window, and put rows and plans into the outbox."""
        if self._looked_ns:
            self._looks.observe(time.monotonic_ns() - self._looked_ns)
            self._looked_ns = 0
        now_ns = time.time_ns()
        self._shards.log(self.scheduler.expire(now_ns))
        plans: list[tuple[str, bytes]] = []
        started: list[bytes] = []
        self.is_filling = self.is_gathering = False
        self.due_ns = 0
        for name, link in self.pairings.links.items():
            if self._backlogs.behind and self._backlogs.holds_up(self._written_by(link)):
                continue
            worker = self.scheduler.workers[name]
            is_idle = not worker.in_flight
            while not self.is_filling and self.scheduler.may_plan(name):
                since_ns = time.monotonic_ns()
                if (due_ns := link.pacing.due_ns(since_ns)) - since_ns > self._looks.ns:
                    self.due_ns = min(self.due_ns or due_ns, due_ns)
                    break
                if self._intake.gathering.waits(worker, since_ns):
                    self.is_gathering = True
                    break
                if (plan := self.scheduler.schedule(name, now_ns)) is None:
                    break
                self._intake.gathering.has_planned(name)
                planned_ns = time.monotonic_ns()
                link.pacing.issue(plan.step, plan.num_tokens, planned_ns)
                self._meters.note_plan(plan, planned_ns)
                for admission in plan.admissions if is_debugging() else ():
                    admitted_id = format_request_id(admission.request_id)
                    _log.debug("admitted", request_id=admitted_id, worker=name, slot=admission.slot, step=plan.step)
                plans.append((name, encode_plan(plan, self.sid, link.incarnation, time.time_ns())))
                started += (admission.request_id for admission in plan.admissions)
                # A device that has nothing to do gets its first plan before others are made.
                self.is_filling = is_idle and self._window > 1
        for commit in self._shards.commits(plans, started):
            self.outbox.put(commit)

    def look_around(self, *, is_draining: bool) -> None:
        """Do what is due now and then: a survey of the pool, a claim."""
        now_ns, claiming = time.monotonic_ns(), self._intake.claiming
        if self._neighbours.is_due(now_ns):
            self._intake.look()
            self._neighbours.survey(now_ns, is_draining=is_draining)
            self.outbox.put(Overdue(OVERDUE_COUNT), self._reject_overdue)
        if self._backlogs.is_due(now_ns):
            shards = tuple(sorted({*self._shards.in_use(), *self._homes()}))
            self.outbox.put(LogBacklogs(shards), partial(self._note_backlogs, shards))
        if claiming.sweeps(now_ns):
            self._shards.forget_ended(self.scheduler.requests)
        if claiming.is_due and not is_draining:
            self._claim()

    @property
    def pause_s(self) -> float:
        """For how long nothing is read, because a plan waits for its time."""
        return self._looks.pause_ns(self.due_ns - time.monotonic_ns()) / 1e9 if self.due_ns else 0.0

    def look_before_plan(self, *, is_draining: bool) -> None:
        """Claim, where a plan is about to be made, without having read that there are requests: to read that first
        takes an exchange more, and what has just missed a plan waits for a whole step.
        """
        now_ns, pending = time.monotonic_ns(), self.outbox.pending
        if self.due_ns and self._looks.is_near(self.due_ns - now_ns, is_writing=bool(pending)):
            self._looked_ns = now_ns
            if not is_draining and not any(isinstance(each.call, Claim) for each in pending):
                self._claim()

    def _claim(self) -> None:
        # Without any living worker requests are claimed too, so that their deadlines and cancels count.
        can_serve = bool(self.pairings.links) or not self.pairings.is_worker_alive
        if can_serve and self.scheduler.has_room():
            shard = self._shard()
            if not self._backlogs.holds_up((shard,)):
                self._intake.claim(shard)

    def receive(self, entries: Mapping[bytes, list[Entry]]) -> None:
        """Take in what a read has brought, by stream."""
        for link in list(self.pairings.links.values()):
            for entry in entries.get(self._keys.results(link.worker), ()):
                link.position = entry.entry_id
                if not self._receive_result(link, entry):
                    break
        for entry in entries.get(self._keys.cancels, ()):
            self._positions[self._keys.cancels] = entry.entry_id
            self._receive_cancel(entry)
        for entry in entries.get(self._keys.requests, ()):
            self._positions[self._keys.requests] = entry.entry_id
            self._intake.claiming.is_due = True  # though what it tells of may have been claimed meanwhile

    def positions(self) -> dict[bytes, bytes]:
        """The streams to read, and after which entries."""
        links = self.pairings.links.values()
        return self._positions | {self._keys.results(link.worker): link.position for link in links}

    # Results and cancels.

    def _receive_result(self, link: PairedWorker, entry: Entry) -> bool:
        """Apply one result; false if the epoch is over by it."""
        now_ns, start_s = time.time_ns(), time.perf_counter()
        stream = f"results:{link.worker}"
        try:
            received = decode_result(entry.fields.get(keys.PAYLOAD, b"\xff"))
            if (received.session, received.incarnation) != (self.sid, link.incarnation):
                return True
            if received.error is not None:
                _log.error("the worker ended the epoch", worker=link.worker, reason=received.error.message)
                if received.error.code is not ErrorCode.UNAVAILABLE:  # else nothing that it computed is to blame
                    self._neighbours.strike(link)
                self._neighbours.end_epoch(link.worker)
                return False
            rows = self.scheduler.apply(link.worker, received.result, now_ns)
        except (PoisonMessageError, StepError) as error:
            self.outbox.bury(stream, entry.fields, str(error))
            self._neighbours.end_epoch(link.worker)
            return False
        link.heard_ns = time.monotonic_ns()
        result = received.result
        link.pacing.answer(result.step, result.step_ns, result.idle_ns, received.slack_ns, link.heard_ns)
        self._shards.log(rows, Computed(link.worker, link.incarnation, result.step))
        self._meters.results.observe(received.sent_ns, now_ns, time.perf_counter() - start_s)
        return True

    def _receive_cancel(self, entry: Entry) -> None:
        now_ns, start_s = time.time_ns(), time.perf_counter()
        try:
            request_id, reason, sequence = decode_cancel(entry.fields)
        except PoisonMessageError as error:
            self.outbox.bury("cancels", entry.fields, str(error))
            return
        self._shards.log(self.scheduler.cancel(request_id, reason, now_ns, sequence))
        sent_ns = number(entry.fields.get(keys.SENT_NS, b""))
        if sent_ns >= self._begun_ns:  # older ones did not wait for this scheduler: others heard them before
            self._meters.cancels.observe(sent_ns, now_ns, time.perf_counter() - start_s)

    def _reject_overdue(self, requests: list[StoredRequest]) -> None:
        """End what is cancelled or too late while it waits for tokens or for room in a scheduler."""
        for request in requests:
            request_id, shard = request.request_id, self._shard()
            error = cancel_error(CancelReason(request.cancel_reason or CancelReason.DEADLINE))
            rows = unstarted_rows(request_id, num_samples(request.body), error)
            payload = encode_rows(rows, self.sid, Computed(sent_ns=time.time_ns()))
            self.outbox.put(Reject(request_id, b"", shard, payload))

    # The log.

    def _shard(self) -> int:
        return self._shards.choose(self._homes(), self._backlogs.behind)

    def _note_backlogs(self, shards: tuple[int, ...], lengths: list[int]) -> None:
        self._backlogs.note(shards, lengths)
        self._meters.log_backlogs = self._backlogs.lengths

    def _homes(self) -> list[int]:
        return [self._shards.home(name, link.offer) for name, link in self.pairings.links.items()]

    def _written_by(self, link: PairedWorker) -> set[int]:
        """The shards that a worker's next steps write."""
        running = self.scheduler.workers[link.worker].running()
        home = self._shards.home(link.worker, link.offer)
        return self._shards.of(sequence.request.request_id for sequence in running) | {home}
