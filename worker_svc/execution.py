"""Launches plans in the order in which they came, and a thread publishes what each produced.

Where a launch only starts the step, the reader launches: a thread of its own would cost a wake-up in each step. On a
CPU a launch is the whole step; there a second thread launches, so that the reader can keep the session meanwhile.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from queue import SimpleQueue

import structlog

from contract.domain.errors import ErrorCode, PenstockError
from contract.domain.plan import StepPlan
from contract.domain.request import format_request_id
from servicekit.logs import is_debugging
from worker_svc import wire
from worker_svc.core.interface import DeviceError, PendingStep, Runner
from worker_svc.core.stats import ExecutionStats

_log = structlog.get_logger(__name__)

_FIRST_KERNEL_NS = 1_000_000  # from the beginning of a launch at most


@dataclass(slots=True, eq=False)
class Epoch:
    """One pairing of a scheduler's session and this worker's incarnation."""

    session: bytes
    incarnation: bytes
    is_superseded: bool = False  # a later one began: nobody waits for its results


@dataclass(frozen=True, slots=True)
class Failure:
    """The epoch is over; `step` is the first that was not carried out."""

    epoch: Epoch | None  # None: there was none yet
    step: int
    error: PenstockError


@dataclass(frozen=True, slots=True)
class _Plan:
    epoch: Epoch
    plan: StepPlan
    came_ns: int  # monotonic


@dataclass(frozen=True, slots=True)
class _Launched:
    epoch: Epoch
    pending: PendingStep
    at_ns: int  # monotonic
    ready_ns: int  # when the device could have begun it, had it nothing else to do; monotonic


class Execution:
    """Carries out plans on one rank. The reader submits; `failures` and `fatal` tell it what it must act on.

    What is launched depends only on the order of submission, never on timing: all ranks of a worker launch the same.
    """

    def __init__(
        self,
        runner: Runner,
        publish: Callable[[bytes], None],
        keep: Callable[[Mapping[bytes, bytes]], None],
        settle: Callable[[], None],
        stats: ExecutionStats,
        *,
        is_alone: bool,
        launches_apart: bool = True,
    ) -> None:
        """Nothing runs yet.

        Args:
            runner: of this rank.
            publish: takes a penstock.v1.StepResult; called from one thread.
            keep: takes what was computed of prompts, by request, before the result that completes these; called from
                the same.
            settle: makes sure that what was published has arrived; called from the same when there is time.
            stats: counts what ends.
            is_alone: there are no other ranks, which would wait for ever for one whose launch failed.
            launches_apart: a thread of its own launches; else `submit` does.
        """
        self._runner = runner
        self._publish = publish
        self._keep = keep
        self._settle = settle
        self._stats = stats
        self._is_alone = is_alone
        self._launches_apart = launches_apart
        self._over: set[bytes] = set()  # incarnations whose epoch failed: their plans are not carried out any more
        self._plans: SimpleQueue[_Plan | Failure | None] = SimpleQueue()
        self._launched: SimpleQueue[_Launched | Failure | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._guarded, args=(body,), name=name, daemon=True)
            for name, body in (("launch", self._launch_all), ("publish", self._publish_all))
        ]
        self._waiting_since_ns = 0
        self._launching_since_ns = 0
        self._is_ending = False
        self.failures: deque[Failure] = deque()  # of epochs that ended; the reader takes them away
        self.fatal: Exception | None = None  # the process should end

    @property
    def num_queued(self) -> int:
        """Plans that were submitted and not launched."""
        return self._plans.qsize()

    @property
    def is_idle(self) -> bool:
        """Return whether nothing is queued, and no step is waited for."""
        return not self._waiting_since_ns and self._plans.empty() and self._launched.empty()

    @property
    def waiting_since_ns(self) -> int:
        """The time at which the step that is waited for was launched (monotonic); 0: none is."""
        return self._waiting_since_ns

    @property
    def launching_since_ns(self) -> int:
        """The time at which the launch that runs now began (monotonic); 0: none does."""
        return self._launching_since_ns

    def start(self) -> None:
        """Begin to take plans."""
        for thread in self._threads:
            thread.start()

    def submit(self, epoch: Epoch, plan: StepPlan) -> None:
        """Carry out `plan` after those submitted before.

        Raises:
            DeviceError: the device failed; only where `submit` launches.
        """
        self._take(_Plan(epoch, plan, time.monotonic_ns()))

    def fail(self, failure: Failure) -> None:
        """End an epoch once what was submitted before is done."""
        self._take(failure)

    def _take(self, item: _Plan | Failure) -> None:
        if self._launches_apart:
            self._plans.put(item)
        else:
            self._launch(item)

    def finish(self, seconds: float) -> bool:
        """Take nothing more and wait at most so long until all is published; whether it was. May be called again."""
        if not self._is_ending:
            self._is_ending = True
            self._plans.put(None)
        until_s = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _guarded(self, body: Callable[[], None]) -> None:
        try:
            body()
        except Exception as error:  # noqa: BLE001  (handed to the reader, which ends the process)
            self.fatal = error
        finally:
            self._launched.put(None)

    def _launch_all(self) -> None:
        while (item := self._plans.get()) is not None:
            self._launch(item)

    def _launch(self, item: _Plan | Failure) -> None:
        if item.epoch is not None and item.epoch.incarnation in self._over:
            return
        if isinstance(item, Failure):
            if item.epoch is not None:
                self._over.add(item.epoch.incarnation)
            self._launched.put(item)
            return
        for admission in item.plan.admissions if is_debugging() else ():
            request_id = format_request_id(admission.request_id)
            _log.debug("begun", request_id=request_id, slot=admission.slot, step=item.plan.step)
        self._launching_since_ns = time.monotonic_ns()
        try:
            pending = self._runner.launch(item.plan)
        except DeviceError:
            raise
        except Exception as error:
            # A plan that is not consistent is refused on all ranks alike; anything else may have hit this one only.
            if not self._is_alone and not isinstance(error, PenstockError):
                raise
            self._over.add(item.epoch.incarnation)
            self._launched.put(Failure(item.epoch, item.plan.step, _as_penstock_error(item.plan.step, error)))
        else:
            now_ns = time.monotonic_ns()
            # A launch on a CPU is the step itself. Kernel by kernel, a launch goes on after the device has begun.
            launched_ns = min(now_ns, self._launching_since_ns + _FIRST_KERNEL_NS)
            self._launched.put(
                _Launched(item.epoch, pending, now_ns, item.came_ns if self._launches_apart else launched_ns)
            )
        finally:
            self._launching_since_ns = 0

    def _next(self) -> "_Launched | Failure | None":
        if self._launched.empty():
            self._settle()
        return self._launched.get()

    def _publish_all(self) -> None:
        ended_ns = time.monotonic_ns()
        while (item := self._next()) is not None:
            if isinstance(item, Failure):
                epoch = item.epoch
                _log.error("epoch ended", step=item.step, reason=item.error.message)
                if epoch is not None and not epoch.is_superseded:
                    now_ns = time.time_ns()
                    self._publish(wire.encode_failure(item.step, item.error, epoch.session, epoch.incarnation, now_ns))
                self.failures.append(item)
                continue
            self._waiting_since_ns = item.at_ns
            result = item.pending.result()
            slack_ns, ended_ns = ended_ns - item.ready_ns, time.monotonic_ns()
            self._waiting_since_ns = 0
            self._stats.observe(result)
            if not item.epoch.is_superseded:
                session, incarnation = item.epoch.session, item.epoch.incarnation
                if prompts := wire.encode_prompts(result):
                    self._keep(prompts)
                self._publish(wire.encode_result(result, session, incarnation, time.time_ns(), slack_ns))
        self._settle()


def _as_penstock_error(step: int, error: Exception) -> PenstockError:
    if isinstance(error, PenstockError):
        return error
    _log.error("launch failed", step=step, exc_info=error)
    return PenstockError(ErrorCode.INTERNAL, f"step {step} failed: {type(error).__name__}: {error}")
