"""Between bus and core: what was read goes to the core, what the core decides becomes calls to the bus."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from functools import partial

import structlog

from contract.domain.errors import ErrorCode, PoisonMessageError
from contract.domain.finish import CancelReason, RequestError
from contract.domain.request import format_request_id
from contract.domain.rows import unstarted_rows
from contract.domain.timeline import Computed
from scheduler_svc.backlogs import Backlogs
from scheduler_svc.claiming import ASK_AGAIN_NS, CLAIM_COUNT, Claiming, number
from scheduler_svc.core.history import History, continued, diverged_rows, restore
from scheduler_svc.core.models import Absences
from scheduler_svc.core.rows import cancel_error, finish_of
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.worker import StepError
from scheduler_svc.gathering import Gathering
from scheduler_svc.metrics import Meters
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
from scheduler_svc.pending import Pending
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.shards import Shards
from scheduler_svc.wire import (
    decode_cancel,
    decode_request,
    decode_result,
    decode_witness,
    decode_worker_info,
    encode_plan,
    encode_rows,
    model_digest_of,
    num_samples,
    read_loaded,
)
from servicekit.bus import keys
from servicekit.bus.calls import (
    NOT_YET,
    UNWANTED,
    Append,
    Claim,
    Claimed,
    Commit,
    Entry,
    HandOver,
    Load,
    Loaded,
    LogBacklogs,
    Overdue,
    Owned,
    Pair,
    Pairing,
    Reject,
    SessionInfo,
    Settling,
    StoredRequest,
    Strike,
    Struck,
    Surveyed,
    Take,
    Unpair,
    Unwanted,
    WorkerEntry,
)
from servicekit.bus.dead_letters import dead_letter
from servicekit.bus.keys import Keys
from servicekit.logs import is_debugging
from servicekit.roster import Roster

_log = structlog.stdlib.get_logger(__name__)

OVERDUE_COUNT = 64
SURVEY_NS = 200_000_000
HAND_OVER_NS = 1_000_000_000  # without a worker that is paired, while another scheduler has one


class Dispatcher:
    """All that belongs to one session: it is begun anew when the session is lost."""

    def __init__(self, settings: SchedulerSettings, names: Keys, sid: bytes, meters: Meters) -> None:
        self.sid = sid
        self.scheduler = Scheduler(settings.scheduling)
        self.pairings = Pairings()
        self.outbox: list[Pending] = []
        self.is_leaving = False  # the requests are to be handed to others
        self.is_filling = False  # more plans may follow those that were just made
        self.due_ns = 0  # when the next plan is made that waits for its time, monotonic; 0: none does
        self.is_gathering = False  # a plan waits for requests that are on their way
        self._window = settings.plans_in_flight
        self._backlogs = Backlogs(settings.max_log_backlog)
        self._keys = names
        self._meters = meters
        self._gathering = Gathering()
        self._shards = Shards(sid, settings.num_shards)
        self._positions = {names.requests: b"0-0", names.cancels: b"0-0"}
        self._claiming = Claiming()
        self._roster = Roster()
        self._must_look = False  # for what is owned and was not loaded
        self._gone = Absences(round(settings.model_gone_s * 1e9))  # from the pool
        self._elsewhere = Absences(HAND_OVER_NS)  # from this scheduler's workers
        self._model_gone_s = settings.model_gone_s
        self._survey_ns = self._linked_ns = 0
        self._begun_ns = time.time_ns()
        self._is_draining = False

    @property
    def is_done(self) -> bool:
        """Return whether no request is held and everything was told."""
        return not self.scheduler.requests and not self.outbox and not self._shards.has_rows

    def send_again(self) -> None:
        """After answers were lost: send what must arrive, and look for what a claim or a take may have brought."""
        repeated = (Commit, Append, Strike, HandOver)
        self.outbox = [each for each in self.outbox if isinstance(each.call, repeated)]
        self.outbox.append(Pending(Owned(self.sid), self._found_owned))
        self._roster.forget()
        self._survey_ns = 0
        self._claiming.is_due = True

    def plan(self) -> None:
        """Expire what is late, fill every worker's window, and put rows and plans into the outbox."""
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
                if (due_ns := link.pacing.due_ns(since_ns)) > since_ns:
                    self.due_ns = min(self.due_ns or due_ns, due_ns)
                    break
                if self._gathering.waits(worker, since_ns):
                    self.is_gathering = True
                    break
                if (plan := self.scheduler.schedule(name, now_ns)) is None:
                    break
                self._gathering.has_planned(name)
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
        self.outbox += map(Pending, self._shards.commits(plans, started))

    def look_around(self, *, is_draining: bool) -> None:
        """Do what is due now and then: a survey of the pool, a claim."""
        sid, now_ns = self.sid, time.monotonic_ns()
        self._is_draining = is_draining
        if now_ns >= self._survey_ns:
            self._survey_ns = now_ns + SURVEY_NS
            if self._must_look:
                self._must_look = False
                self.outbox.append(Pending(Owned(sid), self._found_owned))
            self.outbox.append(Pending(self._roster.survey(), self._surveyed))
            self.outbox.append(Pending(Overdue(OVERDUE_COUNT), self._reject_overdue))
        if self._backlogs.is_due(now_ns):
            shards = tuple(sorted({*self._shards.in_use(), *self._homes()}))
            self.outbox.append(Pending(LogBacklogs(shards), partial(self._note_backlogs, shards)))
        if self._claiming.sweeps(now_ns):
            self._shards.forget_ended(self.scheduler.requests)
        # Without any living worker requests are claimed too, so that their deadlines and cancels count.
        can_serve = bool(self.pairings.links) or not self.pairings.is_worker_alive
        if self._claiming.is_due and can_serve and not is_draining and self.scheduler.has_room():
            shard = self._shard()
            if not self._backlogs.holds_up((shard,)):
                self._claiming.is_due = False
                self.outbox.append(Pending(Claim(sid, CLAIM_COUNT, shard), self.claimed))

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
            self._claiming.hint(entry)

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
                    self._strike(link)
                self._end_epoch(link.worker)
                return False
            rows = self.scheduler.apply(link.worker, received.result, now_ns)
        except (PoisonMessageError, StepError) as error:
            self._bury(stream, entry.fields, str(error))
            self._end_epoch(link.worker)
            return False
        link.heard_ns = time.monotonic_ns()
        link.pacing.answer(received.result.step, received.result.step_ns, received.slack_ns, link.heard_ns)
        self._shards.log(rows, Computed(link.worker, link.incarnation, received.result.step))
        self._meters.results.observe(received.sent_ns, now_ns, time.perf_counter() - start_s)
        return True

    def _receive_cancel(self, entry: Entry) -> None:
        now_ns, start_s = time.time_ns(), time.perf_counter()
        try:
            request_id, reason, sequence = decode_cancel(entry.fields)
        except PoisonMessageError as error:
            self._bury("cancels", entry.fields, str(error))
            return
        self._shards.log(self.scheduler.cancel(request_id, reason, now_ns, sequence))
        sent_ns = number(entry, keys.SENT_NS)
        if sent_ns >= self._begun_ns:  # older ones did not wait for this scheduler: others heard them before
            self._meters.cancels.observe(sent_ns, now_ns, time.perf_counter() - start_s)

    def _end_epoch(self, worker: str) -> None:
        """The worker's sequences wait again; the worker is told by the next survey and begins anew."""
        self.scheduler.remove_worker(worker)
        self.pairings.end(worker)
        self._survey_ns = 0

    def _strike(self, link: PairedWorker) -> None:
        """Give strikes: what the worker was computing may be the reason why it is lost."""
        struck, rows = self.scheduler.strike(link.worker)
        self._meters.recoveries.lose("worker", link.heard_ns, [each.request_id for each in struck])
        self._shards.log(rows)
        if struck:
            told = tuple(Struck(each.request_id, each.num_strikes, each.struck_at) for each in struck)
            self.outbox.append(Pending(Strike(self.sid, told)))

    # Requests.

    def claimed(self, claimed: Claimed | Settling) -> None:
        """Take in what a claim has brought."""
        if claimed is NOT_YET:
            self._claiming.settles(time.monotonic_ns())
            return
        if claimed.num_buried:
            _log.error("dead letters", stream="requests", count=claimed.num_buried, why=keys.NO_REQUEST.decode())
            self._meters.dead_letters["requests"] += claimed.num_buried
        self._claiming.is_due = len(claimed) == CLAIM_COUNT
        for request in claimed:
            self._add(request)
        held = self.scheduler.requests
        num_tokens = sum(held[each.request_id].num_prompt_tokens for each in claimed if each.request_id in held)
        self._gathering.note(num_tokens, claimed.num_coming, time.monotonic_ns())

    def _reject_overdue(self, requests: list[StoredRequest]) -> None:
        """End what is cancelled or too late while it waits for tokens or for room in a scheduler."""
        for request in requests:
            request_id, shard = request.request_id, self._shard()
            error = cancel_error(CancelReason(request.cancel_reason or CancelReason.DEADLINE))
            rows = unstarted_rows(request_id, num_samples(request.body), error)
            payload = encode_rows(rows, self.sid, Computed(sent_ns=time.time_ns()))
            self.outbox.append(Pending(Reject(request_id, b"", shard, payload)))

    def _found_owned(self, request_ids: list[bytes]) -> None:
        unknown = [each for each in request_ids if each not in self.scheduler.requests]
        if unknown:
            self.outbox.append(Pending(Load(self.sid, tuple(unknown)), self._loaded))

    def _taken(self, since_ns: int, request_ids: list[bytes] | Settling | None) -> None:
        if request_ids is NOT_YET:
            self._survey_ns = time.monotonic_ns() + ASK_AGAIN_NS
            return
        if request_ids:
            self._meters.recoveries.lose("scheduler", since_ns, request_ids)
            _log.info("took requests over", count=len(request_ids))
            self._found_owned(request_ids)

    def _loaded(self, loaded: Loaded | Settling) -> None:
        """Go on with requests that another session began, after what checkpoints and log hold of them."""
        if loaded is NOT_YET:
            self._must_look = True
            return
        for request, histories in read_loaded(loaded):
            self._add(request, histories)

    def _add(self, stored: StoredRequest, histories: Sequence[History] = ()) -> None:
        """Hand a request to the core, after what is known of it: by the log, and by its gateway if that is more."""
        now_ns, start_s = time.time_ns(), time.perf_counter()
        request_id = stored.request_id
        self._shards.open(request_id, stored.shard or 0)
        try:
            request = decode_request(request_id, stored.header, stored.body, stored.meta, stored.token_ids)
            witness, told = decode_witness(stored.witness, request.n)
        except PoisonMessageError as error:
            self._bury("requests", {keys.REQUEST: request_id}, str(error))
            failure = RequestError(ErrorCode.INTERNAL, "the request was damaged on its way; send it again")
            self._shards.log(unstarted_rows(request_id, num_samples(stored.body), failure))
            return
        if histories or witness:
            histories = histories or [History() for _ in range(request.n)]
            began_on = (history.model_digest for history in histories if history.model_digest)
            model_digest = next(began_on, stored.model_digest)
            lacking = restore(
                request_id, histories, witness, told, partial(finish_of, request), model_digest=model_digest
            )
            if lacking is None:
                _log.error("what was logged and what was delivered differ", request_id=format_request_id(request_id))
                self._shards.log(diverged_rows(request_id, histories))
                return
            self._shards.log(lacking)
            self._meters.num_restored_tokens += len(lacking.token_ids)
            request = continued(request, histories)
        if stored.strikes:
            request = dataclasses.replace(request, num_strikes=stored.strikes, struck_at=stored.struck_at)
        self._shards.log(self.scheduler.add(request, now_ns))
        if stored.cancel_reason and request_id in self.scheduler.requests:
            self._shards.log(self.scheduler.cancel(request_id, CancelReason(stored.cancel_reason), now_ns))
        if is_debugging():
            num_tokens = len(request.prompt_token_ids)
            _log.debug("queued", request_id=format_request_id(request_id), num_prompt_tokens=num_tokens)
        sent_ns = self._claiming.take_hint(request_id, now_ns)
        self._meters.requests.observe(sent_ns, now_ns, time.perf_counter() - start_s)

    # Workers and other schedulers.

    def _surveyed(self, surveyed: Surveyed | None) -> None:
        now_s = time.monotonic()
        # Another scheduler may have handed requests over.
        self._must_look |= surveyed is not None and any(each.sid == self.sid for each in surveyed.sessions)
        if self._roster.note(surveyed, now_s):
            self._survey(self._roster.workers(), self._roster.sessions(now_s))
        else:
            self._survey_ns = 0  # the rest of it

    def _survey(self, workers: list[WorkerEntry], sessions: list[SessionInfo]) -> None:
        sid, now_ns = self.sid, time.monotonic_ns()
        for name in self.pairings.lost(workers, sid):
            link = self.pairings.links[name]
            died = has_died(link.incarnation, sessions)
            _log.warning("lost a worker; its sequences go on elsewhere", worker=name, died=died)
            if died:
                self._strike(link)
            self.scheduler.remove_worker(name)
            self.pairings.end(name)
        for entry in self.pairings.to_end(workers, sid, now_ns):
            plan = encode_plan(gap_plan(), sid, entry.incarnation, time.time_ns())
            self.outbox.append(Pending(Commit(sid, (), entry.worker, plan)))
        wanted = self.pairings.to_pair(workers, sessions, sid, now_ns)
        for name in wanted:
            self.outbox.append(Pending(Pair(sid, name), partial(self._paired, name)))
        for name in set(self.pairings.unserved(workers, sid)).difference(wanted):
            self.outbox.append(Pending(Unpair(sid, name)))
        if self.pairings.has_one_for_another(workers, sessions):
            self._give_back(min(self.pairings.links, key=lambda name: self.scheduler.workers[name].num_running), now_ns)
        if self.pairings.links or not serves_elsewhere(workers, sid):
            self._linked_ns = now_ns
            for dead in () if self._is_draining else dead_schedulers(sessions, sid):
                since_ns = now_ns - dead.silent_ms * 1_000_000
                self.outbox.append(Pending(Take(sid, dead.sid), partial(self._taken, since_ns)))
        elif self.scheduler.requests and (is_bereft(workers, sid) or now_ns - self._linked_ns > HAND_OVER_NS):
            _log.warning("no worker is left for this scheduler: handing its requests to others")
            self.is_leaving = True
        self.is_leaving |= self._is_draining and is_waited_for(workers, sessions, sid)
        self._follow_models(workers, sessions, now_ns)

    def _follow_models(self, workers: list[WorkerEntry], sessions: list[SessionInfo], now_ns: int) -> None:
        """Hand over or end the requests whose model no worker of this scheduler has."""
        wanted = self.scheduler.models
        living = {entry: model_digest_of(entry) for entry in workers if entry.alive} if wanted else {}
        present = {each for each in living.values() if each is not None}
        for model_digest in self._gone.note(wanted, present, now_ns):
            _log.error("requests end: no worker has their model any more", model_digest=model_digest.hex())
            self._shards.log(self.scheduler.abandon(model_digest, self._model_gone_s))
        here = {link.offer.model_digest for link in self.pairings.links.values()}
        others = staying_schedulers(sessions) - {self.sid}
        for model_digest in self._elsewhere.note(wanted, here, now_ns):
            owners = [entry.owner for entry, model in living.items() if model == model_digest and entry.owner in others]
            if owners and owners[0] is not None:
                self._hand_over(model_digest, owners[0])

    def _hand_over(self, model_digest: bytes, receiver: bytes) -> None:
        request_ids = tuple(self.scheduler.requests.of_model(model_digest))
        _log.info("hands requests to another scheduler, whose workers have their model", count=len(request_ids))
        self.scheduler.hand_over(request_ids)
        self.outbox.append(Pending(HandOver(self.sid, receiver, request_ids), partial(self._handed_over, request_ids)))

    def _handed_over(self, request_ids: tuple[bytes, ...], gone: list[bytes]) -> None:
        """Load again the requests that the other scheduler did not get, since it has died."""
        if left := [each for each in request_ids if each not in set(gone)]:
            self._found_owned(left)

    def _give_back(self, worker: str, now_ns: int) -> None:
        _log.info("gave a worker to another scheduler", worker=worker)
        self.scheduler.remove_worker(worker)
        self.pairings.give_back(worker, now_ns)
        self.outbox.append(Pending(Unpair(self.sid, worker)))

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
            self._bury(f"worker:{worker}", {keys.PAYLOAD: pairing.info}, str(error))
            self.pairings.refuse(pairing.incarnation)
            return
        self.pairings.begin(PairedWorker(worker, pairing.incarnation, offer, pairing.results_after))
        self._shards.log(self.scheduler.add_worker(worker, offer.limits, offer.model_digest))
        self._claiming.is_due = True
        digest, num_blocks = offer.model_digest.hex(), offer.limits.num_blocks
        _log.info("paired", worker=worker, model=offer.model, model_digest=digest, num_blocks=num_blocks)

    # The log.

    def _shard(self) -> int:
        return self._shards.choose(self._homes(), self._backlogs.behind)

    def _note_backlogs(self, shards: tuple[int, ...], lengths: list[int]) -> None:
        self._backlogs.note(shards, lengths)
        self._meters.log_backlogs = self._backlogs.lengths

    def _homes(self) -> list[int]:
        return [self._shards.home(link.offer) for link in self.pairings.links.values()]

    def _written_by(self, link: PairedWorker) -> set[int]:
        """The shards that a worker's next steps write."""
        running = self.scheduler.workers[link.worker].running()
        return self._shards.of(sequence.request.request_id for sequence in running) | {self._shards.home(link.offer)}

    def _bury(self, stream: str, fields: Mapping[bytes, bytes], why: str) -> None:
        """Keep what cannot be read, for the operator."""
        _log.error("dead letter", stream=stream, why=why)
        self._meters.dead_letters[stream.partition(":")[0]] += 1
        self.outbox.append(Pending(dead_letter(self._keys, stream, fields, why)))
