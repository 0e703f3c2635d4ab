"""The scheduler's loop: read results, requests and cancels, ask the core, commit rows and plans in one write."""

import dataclasses
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import structlog
from prometheus_client.registry import Collector

from penstock import __version__
from penstock.domain.errors import ErrorCode
from penstock.domain.finish import CancelReason, RequestError
from penstock.domain.rows import TokenRows
from penstock.v1 import status_pb2
from scheduler_svc.core.introspection import RequestInfo, SequenceInfo
from scheduler_svc.core.rows import select_rows
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.stats import SchedulerStats
from scheduler_svc.core.worker import StepError
from scheduler_svc.metrics import SchedulerCollector, Sizes
from scheduler_svc.pairing import Link, Pairings, dead_schedulers, gap_plan
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.wire import (
    History,
    PoisonMessageError,
    decode_request,
    decode_result,
    decode_worker_info,
    encode_plan,
    encode_rows,
    failure_rows,
    num_samples,
    read_histories,
)
from servicekit.bus import Bus, BusFull, BusUnavailable, keys
from servicekit.bus.calls import (
    Append,
    Call,
    Claim,
    Commit,
    Entry,
    ListSessions,
    ListWorkers,
    Load,
    Loaded,
    Owned,
    Pair,
    Pairing,
    Read,
    Renew,
    SessionInfo,
    SessionKind,
    StoredRequest,
    Take,
    WorkerEntry,
)
from servicekit.hops import Hop, HopCollector
from servicekit.lifecycle import Stop
from servicekit.session import Session, Stopped
from servicekit.settings import reachable_address, split_address

_log = structlog.stdlib.get_logger(__name__)

BLOCK_MS = 100  # how long an idle turn waits; deadlines are looked at once a turn
READ_COUNT = 256
CLAIM_COUNT = 64
SURVEY_NS = 250_000_000
SWEEP_NS = 1_000_000_000  # a hint may be lost: claim once in a while without one
HAND_OVER_NS = 5_000_000_000  # without a worker, while another scheduler has one
MAX_HINTS = 4096
FULL_PAUSE_S = 0.1


class _Pending(NamedTuple):
    """A call to be written, and what is done with its answer."""

    call: Call[Any]
    answered: Callable[[Any], None] | None = None


class SchedulerService:
    """One scheduler process. `run` is its thread; everything else may be called from any thread."""

    def __init__(self, settings: SchedulerSettings, bus: Bus) -> None:
        self._settings = settings
        self._bus = bus
        self._keys = bus.keys
        self._lock = threading.Lock()  # guards the core and the links; never held while waiting for the bus
        self._started_ns = time.time_ns()
        self._progress_ns = 0
        self._is_connected = False
        self._is_draining = False
        self._session: Session
        self.results_hop = Hop("results")
        self.requests_hop = Hop("requests")
        self.cancels_hop = Hop("cancels")
        self.batch_sequences = Sizes()
        self.step_tokens = Sizes()
        self.dead_letters: Counter[str] = Counter()
        self._reset()

    def _reset(self) -> None:
        """Nothing is owned: at the start, and after a session was lost."""
        self._scheduler = Scheduler(self._settings.scheduling)
        self._pairings = Pairings()
        self._shards: dict[bytes, int] = {}  # of the log, by request
        self._rows: list[tuple[int, bytes]] = []  # (shard, TokenBatch) for the next commit
        self._outbox: list[_Pending] = []
        self._positions = {self._keys.requests: b"0-0", self._keys.cancels: b"0-0"}
        self._hints: dict[bytes, int] = {}  # request → when its hint was sent, Unix nanoseconds
        self._is_claim_due = True
        self._survey_ns = self._sweep_ns = self._linked_ns = 0
        self._next_shard = 0
        self._is_leaving = False

    # What others may ask.

    @property
    def name(self) -> str:
        """What people call this process."""
        return self._settings.name

    @property
    def kind(self) -> SessionKind:
        """A scheduler."""
        return SessionKind.SCHEDULER

    def collectors(self) -> list[Collector]:
        """Its metrics."""
        sizes = (self.batch_sequences, self.step_tokens)
        return [SchedulerCollector(self.stats, *sizes, self.dead_letters), HopCollector(self.hops)]

    @property
    def hops(self) -> tuple[Hop, ...]:
        """The hops that it reads."""
        return (self.results_hop, self.requests_hop, self.cancels_hop)

    def is_ready(self) -> bool:
        """Whether it takes new work."""
        return self._is_connected and not self._is_draining

    def last_progress_ns(self) -> int:
        """`time.monotonic_ns()` of the last turn; now, while it waits for an absent bus."""
        return self._progress_ns if self._is_connected else time.monotonic_ns()

    def drain(self) -> int:
        """Take no new requests and end when those that are held have ended; returns how many these are."""
        self._is_draining = True
        with self._lock:
            return len(self._scheduler.requests)

    def stats(self) -> SchedulerStats:
        """The core's figures."""
        with self._lock:
            return self._scheduler.stats()

    def incarnations(self) -> dict[str, bytes]:
        """The worker incarnations it is paired with, by worker."""
        with self._lock:
            return {name: link.incarnation for name, link in self._pairings.links.items()}

    def block_table(self, request_id: bytes) -> tuple[SequenceInfo, ...] | None:
        """The block tables of a request; None if it is not held here."""
        with self._lock:
            return self._scheduler.block_table(request_id)

    def list_requests(self) -> list[RequestInfo]:
        """The requests that are held."""
        with self._lock:
            return self._scheduler.list_requests()

    def status(self) -> status_pb2.ServiceStatus:
        """What it says of itself."""
        stats, now_ns = self.stats(), time.time_ns()
        workers = stats.workers.values()
        return status_pb2.ServiceStatus(
            ready=self.is_ready(),
            draining=self._is_draining,
            started_unix_ns=self._started_ns,
            version=__version__,
            figures={
                "waiting": stats.num_waiting_seqs,
                "running": stats.num_running_seqs,
                "blocks_used": sum(worker.num_used_blocks for worker in workers),
                "blocks_cached": sum(worker.num_cached_blocks for worker in workers),
                "blocks_total": sum(worker.num_blocks for worker in workers),
                "plans_in_flight": sum(worker.num_plans_in_flight for worker in workers),
                "workers": len(workers),
                "preemptions_total": stats.counters.num_preemptions,
                "prompt_tokens_total": stats.counters.num_prompt_tokens,
                "generated_tokens_total": stats.counters.num_generated_tokens,
                "cached_tokens_total": stats.counters.num_cached_tokens,
            },
            hops=[hop.status(now_ns) for hop in self.hops],
        )

    # The loop.

    def run(self, stop: Stop) -> None:
        """Serve until draining is over: no request is held any more, or the time for it has passed.

        Requests that are left then are taken over by another scheduler, or by this one when it is back.
        """
        address = self._settings.grpc_address
        self._session = Session(
            self._bus,
            SessionKind.SCHEDULER,
            self.name,
            address=reachable_address(address) if split_address(address)[1] else "",
            ttl_ms=round(self._settings.session_ttl_s * 1000),
            stop=stop.now,
        )
        try:
            self._session.connect()
            self._is_connected = True
            while not stop.now.is_set():
                if stop.draining.is_set():
                    self._is_draining = True
                if self._is_draining and not self._scheduler.requests and not self._outbox and not self._rows:
                    break
                self._turn(stop)
        except Stopped:
            _log.info("stopped while the bus was away")
        finally:
            self._is_connected = False
            self._session.leave()

    def _turn(self, stop: Stop) -> None:
        """One write and what came back with it."""
        self._progress_ns = time.monotonic_ns()
        if renewal := self._session.tick(time.monotonic()):
            status = self.status().SerializeToString()
            self._outbox.append(_Pending(dataclasses.replace(renewal, status=status)))
        with self._lock:
            self._plan()
            self._look_around()
        pending = self._outbox
        # An answer that leads to work must not wait behind a blocking read.
        is_idle = all(isinstance(each.call, Commit | Renew | Append) for each in pending)
        read = Read(self._read_positions(), READ_COUNT, BLOCK_MS if is_idle else 0)
        try:
            answers = self._session.connection.execute([*(each.call for each in pending), read])
        except BusUnavailable as error:
            _log.warning("lost the bus", reason=str(error))
            self._recover()
            return
        except BusFull:
            _log.error("the bus is out of memory: sending again")
            self._send_again()
            stop.wait(FULL_PAUSE_S)
            return
        *answers, entries = answers
        if any(map(_is_fenced, pending, answers)):
            self._recover()
            return
        self._outbox = []
        with self._lock:
            for each, answer in zip(pending, answers, strict=True):
                if each.answered is not None:
                    each.answered(answer)
            self._receive(entries)
        if self._is_leaving:  # the next turn finds no connection and begins anew
            self._session.leave()

    def _recover(self) -> None:
        """The bus was away, or the session is fenced. What was not acknowledged is sent again, which is harmless."""
        self._is_connected = False
        recovery = self._session.recover()
        self._is_connected = True
        if recovery.lost:
            _log.warning("fenced: starting over with a new session")
            with self._lock:
                self._reset()
            return
        self._send_again()

    def _send_again(self) -> None:
        """After answers were lost: send what must arrive, and look for what a claim or a take may have brought."""
        repeated = (Commit, Append)
        self._outbox = [each for each in self._outbox if isinstance(each.call, repeated)]
        self._outbox.append(_Pending(Owned(self._session.sid), self._found_owned))
        self._survey_ns = 0
        self._is_claim_due = True

    def _plan(self) -> None:
        """Expire what is late, fill every worker's window, and put rows and plans into the outbox."""
        now_ns = time.time_ns()
        sid = self._session.sid
        self._log_rows(self._scheduler.expire(now_ns))
        plans = []
        for name, link in self._pairings.links.items():
            while (plan := self._scheduler.schedule(name, now_ns)) is not None:
                self.batch_sequences.observe(len(plan.slots))
                self.step_tokens.observe(int(plan.num_tokens.sum()))
                plans.append((name, encode_plan(plan, sid, link.incarnation, time.time_ns())))
        rows, self._rows = tuple(self._rows), []
        if rows or plans:
            first, *others = plans or [("", b"")]
            self._outbox.append(_Pending(Commit(sid, rows, *first)))
            self._outbox += [_Pending(Commit(sid, (), *each)) for each in others]

    def _look_around(self) -> None:
        """What is due now and then: a survey of the pool, a claim."""
        sid, now_ns = self._session.sid, time.monotonic_ns()
        if now_ns >= self._survey_ns:
            self._survey_ns = now_ns + SURVEY_NS
            workers: list[WorkerEntry] = []
            self._outbox.append(_Pending(ListWorkers(), workers.extend))
            self._outbox.append(_Pending(ListSessions(), lambda sessions: self._survey(workers, sessions)))
        if now_ns >= self._sweep_ns:
            self._sweep_ns, self._is_claim_due = now_ns + SWEEP_NS, True
            self._forget_shards()
        # Without any living worker requests are claimed too, so that their deadlines and cancels count.
        can_serve = bool(self._pairings.links) or not self._pairings.is_worker_alive
        if self._is_claim_due and can_serve and not self._is_draining and self._scheduler.has_room():
            self._is_claim_due = False
            self._outbox.append(_Pending(Claim(sid, CLAIM_COUNT, self._shard()), self._claimed))

    def _receive(self, entries: Mapping[bytes, list[Entry]]) -> None:
        for link in list(self._pairings.links.values()):
            for entry in entries.get(self._keys.results(link.worker), ()):
                link.position = entry.entry_id
                if not self._receive_result(link, entry):
                    break
        for entry in entries.get(self._keys.cancels, ()):
            self._positions[self._keys.cancels] = entry.entry_id
            self._receive_cancel(entry)
        for entry in entries.get(self._keys.requests, ()):
            self._positions[self._keys.requests] = entry.entry_id
            self._is_claim_due = True
            if len(self._hints) >= MAX_HINTS:
                self._hints.clear()
            self._hints[entry.fields.get(keys.REQUEST, b"")] = _number(entry, keys.SENT_NS)

    def _read_positions(self) -> dict[bytes, bytes]:
        links = self._pairings.links.values()
        return self._positions | {self._keys.results(link.worker): link.position for link in links}

    # Results and cancels.

    def _receive_result(self, link: Link, entry: Entry) -> bool:
        """Apply one result; false if the epoch is over by it."""
        now_ns, start_s = time.time_ns(), time.perf_counter()
        stream = f"results:{link.worker}"
        try:
            received = decode_result(entry.fields.get(keys.PAYLOAD, b"\xff"))
            if (received.session, received.incarnation) != (self._session.sid, link.incarnation):
                return True
            if received.error is not None:
                _log.error("the worker ended the epoch", worker=link.worker, reason=received.error.message)
                self._end_epoch(link.worker)
                return False
            rows = self._scheduler.apply(link.worker, received.result, now_ns)
        except (PoisonMessageError, StepError) as error:
            self._bury(stream, entry.fields, str(error))
            self._end_epoch(link.worker)
            return False
        self._log_rows(rows, link.incarnation, received.result.step)
        self.results_hop.observe(received.sent_ns, now_ns, time.perf_counter() - start_s)
        return True

    def _receive_cancel(self, entry: Entry) -> None:
        now_ns, start_s = time.time_ns(), time.perf_counter()
        try:
            request_id = entry.fields[keys.REQUEST]
            reason = CancelReason(int(entry.fields[keys.REASON]))
            sequence = int(entry.fields.get(keys.SEQUENCE, b"-1"))
        except (KeyError, ValueError) as error:
            self._bury("cancels", entry.fields, f"not a cancel: {error!r}")
            return
        rows = self._scheduler.cancel(request_id, reason, now_ns, sequence if sequence >= 0 else None)
        self._log_rows(rows)
        self.cancels_hop.observe(_number(entry, keys.SENT_NS), now_ns, time.perf_counter() - start_s)

    def _end_epoch(self, worker: str) -> None:
        """The worker's sequences wait again; the worker is told by the next survey and begins anew."""
        self._scheduler.remove_worker(worker)
        self._pairings.end(worker)
        self._survey_ns = 0

    # Requests.

    def _claimed(self, claimed: list[StoredRequest]) -> None:
        self._is_claim_due = len(claimed) == CLAIM_COUNT
        for request in claimed:
            self._add(request)

    def _found_owned(self, request_ids: list[bytes]) -> None:
        unknown = [each for each in request_ids if each not in self._scheduler.requests]
        if unknown:
            self._outbox.append(_Pending(Load(self._session.sid, tuple(unknown)), self._loaded))

    def _taken(self, request_ids: list[bytes] | None) -> None:
        if request_ids:
            _log.info("took requests over", count=len(request_ids))
            self._found_owned(request_ids)

    def _loaded(self, loaded: Loaded) -> None:
        """Go on with requests that another session began, behind what the log holds of them."""
        wanted = {request.request_id: num_samples(request.body) for request in loaded.requests}
        entries = [entry for log in loaded.log.values() for entry in log]
        histories = read_histories([e.fields[keys.PAYLOAD] for e in entries if keys.PAYLOAD in e.fields], wanted)
        for request in loaded.requests:
            if not all(history.has_ended for history in histories[request.request_id]):
                self._add(request, histories[request.request_id])

    def _add(self, stored: StoredRequest, histories: Sequence[History] = ()) -> None:
        """Hand a request to the core, with what another scheduler has logged of it, if one has."""
        now_ns, start_s = time.time_ns(), time.perf_counter()
        request_id = stored.request_id
        self._shards[request_id] = stored.shard or 0
        try:
            request = decode_request(request_id, stored.header, stored.body, stored.meta)
        except PoisonMessageError as error:
            self._bury("requests", {keys.REQUEST: request_id}, str(error))
            failure = RequestError(ErrorCode.INTERNAL, "the request was damaged on its way; send it again")
            self._log_rows(failure_rows(request_id, num_samples(stored.body), failure))
            return
        if any(history.token_ids or history.has_ended for history in histories):
            request = dataclasses.replace(
                request,
                output_token_ids=tuple(np.array(history.token_ids, np.uint32) for history in histories),
                ended_sequences=frozenset(index for index, history in enumerate(histories) if history.has_ended),
            )
        self._log_rows(self._scheduler.add(request, now_ns))
        if stored.cancel_reason and request_id in self._scheduler.requests:
            self._log_rows(self._scheduler.cancel(request_id, CancelReason(stored.cancel_reason), now_ns))
        sent_ns = self._hints.pop(request_id, now_ns)
        self.requests_hop.observe(sent_ns, now_ns, time.perf_counter() - start_s)

    # Workers and other schedulers.

    def _survey(self, workers: list[WorkerEntry], sessions: list[SessionInfo]) -> None:
        sid, now_ns = self._session.sid, time.monotonic_ns()
        for name in self._pairings.lost(workers, sid):
            _log.warning("lost a worker; its sequences go on elsewhere", worker=name)
            self._scheduler.remove_worker(name)
            self._pairings.end(name)
        for entry in self._pairings.to_end(workers, sid, now_ns):
            plan = encode_plan(gap_plan(), sid, entry.incarnation, time.time_ns())
            self._outbox.append(_Pending(Commit(sid, (), entry.worker, plan)))
        for name in self._pairings.to_pair(workers, sessions, sid):
            self._outbox.append(_Pending(Pair(sid, name), partial(self._paired, name)))
        if self._pairings.links or not _serves_elsewhere(workers, sid):
            self._linked_ns = now_ns
            for dead in dead_schedulers(sessions, sid):
                self._outbox.append(_Pending(Take(sid, dead), self._taken))
        elif self._scheduler.requests and now_ns - self._linked_ns > HAND_OVER_NS:
            _log.warning("no worker is left for this scheduler: handing its requests to others")
            self._is_leaving = True

    def _paired(self, worker: str, pairing: Pairing | None) -> None:
        if pairing is None or worker in self._pairings.links or self._pairings.has_ended(pairing.incarnation):
            return
        try:
            offer = decode_worker_info(pairing.info)
        except PoisonMessageError as error:
            self._bury(f"worker:{worker}", {keys.PAYLOAD: pairing.info}, str(error))
            self._pairings.refuse(pairing.incarnation)
            return
        self._pairings.begin(Link(worker, pairing.incarnation, offer, pairing.results_after))
        self._log_rows(self._scheduler.add_worker(worker, offer.limits))
        self._is_claim_due = True
        _log.info("paired", worker=worker, model=offer.model, num_blocks=offer.limits.num_blocks)

    # The log.

    def _log_rows(self, rows: TokenRows, incarnation: bytes = b"", step: int = 0) -> None:
        """Put rows into the next commit, each into the shard that its request was opened in."""
        if not len(rows):
            return
        shards = [self._shards.get(request_id, 0) for request_id in rows.request_ids]
        distinct = set(shards)
        for shard in distinct:
            part = rows if len(distinct) == 1 else select_rows(rows, np.array(shards) == shard)
            payload = encode_rows(part, self._session.sid, incarnation, step, time.time_ns())
            self._rows.append((shard, payload))

    def _shard(self) -> int:
        """The shard for the next requests: a worker's home, so that a step writes one shard, not all."""
        self._next_shard += 1
        homes = [link.offer.home_shard for link in self._pairings.links.values()]
        shard = homes[self._next_shard % len(homes)] if homes else self._next_shard
        return shard % self._settings.num_shards

    def _forget_shards(self) -> None:
        """Of requests that have ended."""
        if len(self._shards) > 2 * len(self._scheduler.requests) + MAX_HINTS:
            held = self._scheduler.requests
            self._shards = {request_id: shard for request_id, shard in self._shards.items() if request_id in held}

    def _bury(self, stream: str, fields: Mapping[bytes, bytes], why: str) -> None:
        """Keep what cannot be read, for the operator."""
        _log.error("dead letter", stream=stream, why=why)
        self.dead_letters[stream.partition(":")[0]] += 1
        letter = {**fields, keys.STREAM: stream.encode(), keys.WHY: why.encode()}
        self._outbox.append(_Pending(Append(self._keys.dead, letter, keys.DEAD_CAP)))


def _number(entry: Entry, name: bytes) -> int:
    """A decimal field that only measures; 0 if it is missing or malformed."""
    text = entry.fields.get(name, b"")
    return int(text) if text.isdigit() else 0


def _is_fenced(pending: _Pending, answer: Any) -> bool:
    """Whether an answer says that the session is active no more."""
    if isinstance(pending.call, Commit | Renew):
        return not answer
    return isinstance(pending.call, Claim | Owned | Load) and answer is None


def _serves_elsewhere(workers: list[WorkerEntry], sid: bytes) -> bool:
    return any(entry.alive and entry.owner not in (None, sid) for entry in workers)
