"""The worker's loop: hold a session, register, read plans ahead; `execution` carries them out."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import structlog
from prometheus_client.registry import Collector

from contract.domain.errors import ErrorCode, PenstockError
from contract.domain.model_name import served_name
from servicekit.bus import Bus, BusFull, BusUnavailable
from servicekit.bus.calls import Call, Entry, Read, RegisterWorker, Renew, Renewed, SessionKind, Surveyed
from servicekit.bus.dead_letters import dead_letter
from servicekit.doorbell import Doorbell
from servicekit.hops import HopCollector
from servicekit.lifecycle import Stop
from servicekit.pool_stats import Hold, PoolCollector, PoolStats
from servicekit.roster import Roster
from servicekit.session import Session, Stopped
from servicekit.settings import reachable_address
from servicekit.shape import pool_shape
from servicekit.stall import StallWatch
from servicekit.status import ServiceStatus, service_status
from worker_svc import wire
from worker_svc.core.stats import ExecutionStats
from worker_svc.execution import Execution, Failure
from worker_svc.loading import LoadedWorker, load_worker
from worker_svc.metrics import WorkerCollector
from worker_svc.plans import Plans
from worker_svc.ranks import PATIENCE_S, RankWatch
from worker_svc.results import ResultStream
from worker_svc.settings import WorkerSettings

if TYPE_CHECKING:
    from contract.v1 import worker_pb2

_log = structlog.get_logger(__name__)

_BLOCK_MS = 100  # how long a read waits for plans: the worker notices a failure or a signal that much later
_LAUNCH_PATIENCE_S = 120.0  # a launch may have to compile kernels first
_FAILED_GRACE_S = 2.0  # for results that are done when something else failed
_STATUS_INTERVAL_NS = 250_000_000
_UNWANTED = (
    "the pool serves two other models already; it is taken in once one of them has no worker and no request any more"
)
_POSITION_BYTES = 64  # of an entry id, padded


class WorkerService:
    """One rank of a worker; see `servicekit.lifecycle.Service`."""

    def __init__(
        self, settings: WorkerSettings, bus: Bus, load: Callable[[WorkerSettings], LoadedWorker] = load_worker
    ) -> None:
        """Nothing is loaded or connected yet."""
        self._settings = settings
        self._bus = bus
        self._load = load
        self._stats = ExecutionStats()
        self._plans = Plans(self._stats, self._bury)
        self._pool_stats = PoolStats()
        self._steps = bus.keys.steps(settings.name)
        self._bell = Doorbell(bus.keys, settings.stay_awake_ms / 1e3)
        self._started_ns = time.time_ns()
        self._progress_ns = 0
        self._is_ready = False
        self._is_unwanted = False  # the pool serves other models
        self._loaded: LoadedWorker | None = None
        self._execution: Execution | None = None
        self._info = wire.WorkerInfo()  # once loaded: what is registered
        self._told, self._told_ns = b"", 0  # the status that the pool gets, and when it was made
        self._device_watch = StallWatch(settings.step_timeout_s)
        self._stop: Stop | None = None
        self._session: Session | None = None
        self._ranks: RankWatch | None = None  # once they have met, where there are others
        self._is_half_surveyed = False  # more of what is told of the pool is to come

    @property
    def name(self) -> str:
        """The worker's name, with the rank if there are several."""
        return self._name_of(self._settings.rank)

    def _name_of(self, rank: int) -> str:
        settings = self._settings
        return settings.name if settings.tensor_parallel_size == 1 else f"{settings.name}.{rank}"

    @property
    def kind(self) -> SessionKind:
        """A worker."""
        return SessionKind.WORKER

    @property
    def is_leader(self) -> bool:
        """Return whether this is rank 0, which alone registers and publishes."""
        return self._settings.rank == 0

    def collectors(self) -> list[Collector]:
        """For the metrics endpoint."""
        return [
            WorkerCollector(self._stats, self._num_queued, self._model),
            HopCollector([self._plans.hop]),
            PoolCollector(lambda: [Hold(self._bus.keys.pool, self._pool_stats, self._bus.call_times)]),
        ]

    # --- what other threads ask -----------------------------------------------------------------------------------

    def is_ready(self) -> bool:
        """Return whether it is registered, wanted and not draining."""
        return self._is_ready and not self._is_unwanted and not self._is_draining()

    def last_progress_ns(self) -> int:
        """See `Service`. A launch that compiles kernels takes long and is progress; a hung device ends the process.

        To wait for the bus is no hang either.
        """
        now_ns = time.monotonic_ns()
        launching_ns = self._execution.launching_since_ns if self._execution is not None else 0
        if launching_ns and now_ns - launching_ns < _LAUNCH_PATIENCE_S * 1e9:
            return now_ns
        session = self._session
        return max(self._progress_ns, session.waited_ns if session is not None else 0)

    def status(self) -> ServiceStatus:
        """The status that it tells."""
        stats = self._stats
        figures = {
            "plans_queued": float(self._num_queued()),
            "steps": float(stats.num_steps),
            "sampled_tokens": float(stats.num_tokens),
            "device_idle_seconds": stats.idle_s,
            "step_seconds": stats.step.mean,
            "dead_letters": float(stats.num_dead_letters),
        }
        return service_status(
            ready=self.is_ready(),
            draining=self._is_draining(),
            started_ns=self._started_ns,
            figures=figures,
            hops=[self._plans.hop],
            model_digest=self._info.model_digest.hex(),
            note=_UNWANTED if self._is_unwanted else "",
        )

    def worker_status(self) -> "worker_pb2.WorkerStatus":
        """The answer of the control service."""
        return wire.worker_status(
            self.status(),
            self._info,
            incarnation=self._session.sid if self._session is not None else b"",
            step=self._plans.step,
            plans_queued=self._num_queued(),
        )

    def memory_profile(self) -> "worker_pb2.MemoryProfile":
        """The uses of the memory.

        Raises:
            PenstockError: UNAVAILABLE, the model is still being loaded.
        """
        if self._loaded is None:
            raise PenstockError(ErrorCode.UNAVAILABLE, "the model is still being loaded: ask again")
        return wire.memory_profile(self._loaded.profile)

    def drain(self) -> int:
        """Begin to end; how many plans are left to carry out."""
        if self._stop is not None:
            self._stop.drain()
        return self._num_queued()

    def _model(self) -> tuple[str, str]:
        return served_name(self._settings.model), self._info.model_digest.hex()

    def _num_queued(self) -> int:
        return self._execution.num_queued if self._execution is not None else 0

    def _is_draining(self) -> bool:
        return self._stop is not None and self._stop.draining.is_set()

    # --- the loop -------------------------------------------------------------------------------------------------

    def run(self, stop: Stop) -> None:
        """Load, register and serve until drained.

        Raises:
            PenstockError: it cannot be loaded, or the device failed.
        """
        self._stop = stop
        settings = self._settings
        loaded = self._loaded = self._load(settings)
        self._stats.attention = loaded.attention
        self._info = wire.worker_info(
            loaded.runner.limits,
            model=settings.model,
            home_shard=settings.home_shard,
            world_size=settings.tensor_parallel_size,
            device=loaded.device,
            model_digest=loaded.model_digest,
        )
        results = ResultStream(self._bus, settings.name, loaded.model_digest, stop.now)
        execution = self._execution = Execution(
            loaded.runner,
            results.append if self.is_leader else lambda _: None,
            results.keep if self.is_leader else lambda _: None,
            results.settle,
            self._stats,
            is_alone=settings.tensor_parallel_size == 1,
            launches_apart=loaded.device == "cpu",
        )
        execution.start()
        try:
            self._serve(stop, loaded, execution)
        except Exception:
            # A device or another rank that hangs must not keep the process from ending.
            execution.finish(_FAILED_GRACE_S)
            if self._session is not None:
                self._session.abandon()
            raise
        else:
            loaded.close()
        finally:
            self._is_ready = False
            results.close()
            if self._session is not None:
                self._session.leave()

    def _serve(self, stop: Stop, loaded: LoadedWorker, execution: Execution) -> None:
        try:
            self._enter(stop, loaded)
            while not stop.draining.is_set():
                self._turn(execution)
        except Stopped:
            _log.info("told to end while the bus was away")
        while not execution.finish(_BLOCK_MS / 1000) and not stop.now.is_set():
            self._check_device(execution)
            self._stay_alive()
        if execution.fatal is not None:
            raise execution.fatal

    def _check_device(self, execution: Execution) -> None:
        """A device that hangs is of no further use, and what it computes is better computed elsewhere."""
        now_s = time.monotonic()
        if self._device_watch.is_stalled((execution.waiting_since_ns / 1e9) or now_s, now_s):
            timeout_s = self._settings.step_timeout_s
            message = f"the device has not ended a step for {timeout_s:g} s: it hangs (or raise step_timeout_s)"
            raise PenstockError(ErrorCode.INTERNAL, message)

    def _stay_alive(self) -> None:
        """Keep the session while the last plans are carried out."""
        assert self._session is not None
        renew = self._renewal()
        try:
            if renew is not None:
                self._session.connection.call(renew)
        except (BusUnavailable, BusFull) as error:
            _log.warning("not renewed while draining", reason=str(error))

    def _renewal(self) -> Renew | None:
        assert self._session is not None
        self._progress_ns = time.monotonic_ns()
        if self._progress_ns - self._told_ns > _STATUS_INTERVAL_NS:
            self._told_ns, self._told = self._progress_ns, self.status().SerializeToString()
        return self._session.tick(self._progress_ns / 1e9, self._told)

    def _enter(self, stop: Stop, loaded: LoadedWorker) -> None:
        """Join the pool; ranks begin to read `steps` at the same entry."""
        self._session = self._new_session(stop)
        self._session.connect()
        if self.is_leader:
            self._register(self._session)
        self._plans.position = loaded.broadcast(self._plans.position.ljust(_POSITION_BYTES)).rstrip()
        settings = self._settings
        others = [self._name_of(rank) for rank in range(settings.tensor_parallel_size) if rank != settings.rank]
        if others:
            self._ranks = RankWatch(others, max(settings.session_ttl_s, PATIENCE_S))
        self._progress_ns = time.monotonic_ns()
        self._is_ready = True

    def _new_session(self, stop: Stop) -> Session:
        settings = self._settings
        return Session(
            self._bus,
            SessionKind.WORKER,
            self.name,
            address=reachable_address(settings.grpc_address),
            ttl_ms=round(settings.session_ttl_s * 1000),
            stop=stop.draining,
            patience_s=_LAUNCH_PATIENCE_S,
            shape=pool_shape(settings.num_shards),
            stats=self._pool_stats,
        )

    def _register(self, session: Session) -> None:
        """Take the worker's name for the session's incarnation, however long the bus is away."""
        while True:
            try:
                told = self._info.SerializeToString(), self._info.model_digest
                call = RegisterWorker(session.sid, self._settings.name, *told)
                position = session.connection.call(call)
            except (BusUnavailable, BusFull) as error:
                session.recover(error if isinstance(error, BusUnavailable) else None)
                continue
            if position:
                break
            session.recover()
        self._plans.begin(position, session.sid)
        _log.info("registered", incarnation=session.sid.hex(), num_blocks=self._info.num_blocks)

    def _turn(self, execution: Execution) -> None:
        assert self._session is not None
        if execution.fatal is not None:
            raise execution.fatal
        self._check_device(execution)
        while execution.failures:
            self._begin_again(execution.failures.popleft())
        renew = self._renewal()
        # A thread that waits for the device needs the interpreter more than one that looks for plans.
        is_idle = execution.is_idle
        awake_s = self._bell.awake_s() if is_idle else 0.0
        streams = {self._steps: self._plans.position} | self._bell.listen(is_idle=is_idle)
        read = Read(streams, block_ms=_BLOCK_MS, awake_s=awake_s)
        roster = self._session.roster
        survey = None
        if self._ranks is not None and (renew is not None or self._is_half_surveyed):
            survey = roster.survey()
        calls: list[Call[Any]] = [call for call in (renew, survey, read) if call is not None]
        try:
            answers = self._session.connection.execute(calls)
        except BusUnavailable as error:
            self._recover(self._session, error)
            return
        except BusFull as error:
            _log.warning("the server is out of memory", reason=str(error))
            return
        if renew is not None:
            if not answers[0]:
                self._recover(self._session)
                return
            self._note_renewal(answers[0])
        if survey is not None:
            self._note_ranks(roster, answers[-2])
        received_ns = time.time_ns()
        self._bell.hear(answers[-1])
        for entry in answers[-1].get(self._steps, ()):
            self._plans.receive(entry, execution, received_ns)

    def _note_renewal(self, renewed: Renewed) -> None:
        is_unwanted = renewed is Renewed.UNWANTED
        if is_unwanted and not self._is_unwanted:
            _log.error("not taken in", why=_UNWANTED, model_digest=self._info.model_digest.hex())
        self._is_unwanted = is_unwanted

    def _note_ranks(self, roster: Roster, surveyed: Surveyed | None) -> None:
        assert self._ranks is not None
        now_s = time.monotonic()
        self._is_half_surveyed = not roster.note(surveyed, now_s)
        if not self._is_half_surveyed:
            self._ranks.note(roster.sessions(now_s), now_s)

    def _recover(self, session: Session, reason: BusUnavailable | None = None) -> None:
        recovery = session.recover(reason)
        if self._ranks is not None:
            self._ranks.forgive()
        if not self.is_leader:
            return
        if recovery.lost and self._settings.tensor_parallel_size > 1:
            # The others cannot know which plans this rank still launched: they can only begin together.
            raise PenstockError(ErrorCode.INTERNAL, "rank 0 lost its session: all ranks must start again")
        if recovery.lost or recovery.new_run:
            self._register(session)

    def _begin_again(self, failure: Failure) -> None:
        """An epoch ended badly: go on with another incarnation, so that nothing of it can be taken for the next."""
        assert self._session is not None
        assert self._stop is not None
        if failure.epoch is not None and not self.is_leader:
            self._plans.end(failure.epoch.incarnation)
        elif self.is_leader and (failure.epoch is None or failure.epoch.incarnation == self._session.sid):
            self._session.leave()
            self._session = self._new_session(self._stop)
            self._session.connect()
            self._register(self._session)

    def _bury(self, entry: Entry, why: str) -> None:
        assert self._session is not None
        self._stats.num_dead_letters += 1
        _log.error("dead letter", stream="steps", why=why)
        if not self.is_leader:
            return
        try:
            self._session.connection.call(dead_letter(self._bus.keys, "steps", entry.fields, why))
        except (BusUnavailable, BusFull) as error:
            _log.error("a dead letter was not kept", reason=str(error))
