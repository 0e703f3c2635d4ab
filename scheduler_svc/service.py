"""The scheduler's process: its session, its loop of one write and one read a turn, and what others may ask it."""

import dataclasses
import threading
import time

import structlog
from prometheus_client.registry import Collector

from scheduler_svc import wire
from scheduler_svc.core.introspection import RequestInfo, SequenceInfo
from scheduler_svc.core.stats import SchedulerStats
from scheduler_svc.dispatch import Dispatcher
from scheduler_svc.metrics import Meters, SchedulerCollector
from scheduler_svc.outbox import Pending
from scheduler_svc.settings import SchedulerSettings
from servicekit.bus import Bus, BusFull, BusUnavailable
from servicekit.bus.calls import Read, SessionKind
from servicekit.doorbell import Doorbell
from servicekit.hops import HopCollector
from servicekit.lifecycle import Stop
from servicekit.pool_stats import Hold, PoolCollector, PoolStats
from servicekit.session import Session, Stopped
from servicekit.settings import reachable_address
from servicekit.shape import pool_shape
from servicekit.status import ServiceStatus, service_status

_log = structlog.stdlib.get_logger(__name__)

BLOCK_MS = 100  # how long an idle turn waits; deadlines are looked at once a turn
READ_COUNT = 256
FULL_PAUSE_S = 0.1
GATHER_S = 0.0002


class SchedulerService:
    """One scheduler process. `run` is its thread; everything else may be called from any thread."""

    def __init__(self, settings: SchedulerSettings, bus: Bus) -> None:
        self._settings = settings
        self._bus = bus
        self._lock = threading.Lock()  # guards the core and the links; never held while waiting for the bus
        self._started_ns = time.time_ns()
        self._progress_ns = 0
        self._is_connected = False
        self._is_draining = False
        self._session: Session
        self._bell = Doorbell(bus.keys, settings.stay_awake_ms / 1e3)
        self.meters = Meters()
        self._pool_stats = PoolStats()
        self._dispatcher = self._new_dispatcher(b"")

    def _new_dispatcher(self, sid: bytes) -> Dispatcher:
        return Dispatcher(self._settings, self._bus.keys, sid, self.meters)

    # What others may ask.

    @property
    def name(self) -> str:
        """The name by which people call this process."""
        return self._settings.name

    @property
    def kind(self) -> SessionKind:
        """A scheduler."""
        return SessionKind.SCHEDULER

    def collectors(self) -> list[Collector]:
        """Its metrics."""
        return [
            SchedulerCollector(self.stats, self.meters),
            HopCollector(self.meters.hops),
            PoolCollector(lambda: [Hold(self._bus.keys.pool, self._pool_stats, self._bus.call_times)]),
            self.meters.recoveries,
        ]

    def is_ready(self) -> bool:
        """Return whether it takes new work."""
        return self._is_connected and not self._is_draining

    def last_progress_ns(self) -> int:
        """`time.monotonic_ns()` of the last turn; now, while it waits for the bus."""
        if not self._is_connected:
            return time.monotonic_ns()
        return max(self._progress_ns, self._session.waited_ns)

    def drain(self) -> int:
        """Take no new requests and end when those that are held have ended; returns how many these are."""
        self._is_draining = True
        with self._lock:
            return len(self._dispatcher.scheduler.requests)

    def stats(self) -> SchedulerStats:
        """The core's figures."""
        with self._lock:
            return self._dispatcher.scheduler.stats()

    def incarnations(self) -> dict[str, bytes]:
        """The worker incarnations it is paired with, by worker."""
        with self._lock:
            return {name: link.incarnation for name, link in self._dispatcher.pairings.links.items()}

    def block_table(self, request_id: bytes) -> tuple[SequenceInfo, ...] | None:
        """The block tables of a request; None if it is not held here."""
        with self._lock:
            return self._dispatcher.scheduler.block_table(request_id)

    def list_requests(self) -> list[RequestInfo]:
        """The requests that are held."""
        with self._lock:
            return self._dispatcher.scheduler.list_requests()

    def status(self) -> ServiceStatus:
        """The status that it tells."""
        stats = self.stats()
        workers = stats.workers.values()
        status = service_status(
            ready=self.is_ready(),
            draining=self._is_draining,
            started_ns=self._started_ns,
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
                "takes_priorities": float(self._settings.scheduling_policy != "fcfs"),  # read by gateways
            },
            hops=self.meters.hops,
        )
        status.block_maps.extend(wire.block_map(name, each) for name, each in stats.workers.items())
        return status

    # The loop.

    def run(self, stop: Stop) -> None:
        """Serve until draining is over: no request is held any more, or the time for it has passed.

        Requests that are left then are taken over by another scheduler, or by this one when it is back.
        """
        self._session = Session(
            self._bus,
            SessionKind.SCHEDULER,
            self.name,
            address=reachable_address(self._settings.grpc_address),
            ttl_ms=round(self._settings.session_ttl_s * 1000),
            stop=stop.now,
            survives_restarts=False,  # what is held may be more than what the server still has
            shape=pool_shape(self._settings.num_shards),
            stats=self._pool_stats,
        )
        try:
            self._session.connect(stop.draining)
            self._begin()
            self._is_connected = True
            while not stop.now.is_set():
                if stop.draining.is_set():
                    self._is_draining = True
                if self._is_draining and (self._dispatcher.is_done or self._dispatcher.is_leaving):
                    break
                self._turn(stop)
        except Stopped:
            _log.info("stopped while the bus was away")
        finally:
            self._is_connected = False
            self._session.leave()

    def _begin(self) -> None:
        """With a new session nothing is owned."""
        with self._lock:
            self._dispatcher = self._new_dispatcher(self._session.sid)

    def _turn(self, stop: Stop) -> None:
        """One write and what came back with it."""
        self._progress_ns = time.monotonic_ns()
        dispatcher = self._dispatcher
        if renewal := self._session.tick(time.monotonic()):
            status = self.status().SerializeToString()
            draining = self._is_draining
            with self._lock:
                models = b"".join(sorted(dispatcher.scheduler.models))
            renewal = dataclasses.replace(renewal, status=status, draining=draining, models=models)
            dispatcher.outbox.put(renewal)
        with self._lock:
            dispatcher.plan()
            dispatcher.look_around(is_draining=self._is_draining)
        if not dispatcher.outbox.pending and (pause_s := self._pause_s(dispatcher)):
            stop.wait(pause_s)
        with self._lock:
            dispatcher.look_before_plan(is_draining=self._is_draining or stop.draining.is_set())
        pending = dispatcher.outbox.pending
        is_waiting = dispatcher.is_gathering or dispatcher.due_ns
        may_wait = not (dispatcher.is_filling or is_waiting) and all(each.may_wait for each in pending)
        num_requests = len(dispatcher.scheduler.requests)
        block_ms = BLOCK_MS if may_wait else 0
        listening = self._bell.listen(is_idle=not num_requests)
        read = Read(dispatcher.positions() | listening, READ_COUNT, block_ms, self._bell.awake_s(num_requests))
        try:
            *answers, entries = self._session.connection.execute([*(each.call for each in pending), read])
        except BusUnavailable as error:
            self._recover(error)
            return
        except BusFull:
            _log.error("the bus is out of memory: sending again")
            dispatcher.send_again()
            stop.wait(FULL_PAUSE_S)
            return
        if any(map(Pending.is_fenced, pending, answers)):
            self._recover()
            return
        dispatcher.outbox.pending = []
        with self._lock:
            for each, answer in zip(pending, answers, strict=True):
                if each.answered is not None:
                    each.answered(answer)
            dispatcher.receive(entries)
        self._bell.hear(entries)
        if dispatcher.is_leaving:  # the next turn finds no connection and begins anew
            self._session.leave()

    @staticmethod
    def _pause_s(dispatcher: Dispatcher) -> float:
        """For how long nothing is read, because a plan waits: a server ends a wait to a tenth of a second."""
        if not dispatcher.is_gathering:
            return dispatcher.pause_s
        return min(GATHER_S, dispatcher.pause_s) if dispatcher.due_ns else GATHER_S

    def _recover(self, reason: BusUnavailable | None = None) -> None:
        """The bus was away, or the session is fenced. What was not acknowledged is sent again, which is harmless.

        After a restart of the server everything begins anew: it may have lost its last writes, and clients may have
        more than the log. A sibling or this scheduler takes what the old session owned, and loads log and witness.
        """
        self._is_connected = False
        recovery = self._session.recover(reason)
        self._is_connected = True
        if recovery.lost:
            _log.warning("starting over with a new session", server_restarted=recovery.new_run)
            self._begin()
        else:
            self._dispatcher.send_again()
