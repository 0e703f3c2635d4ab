"""The plans of a worker: what its stream has, in order and of one epoch at a time, goes to `execution`."""

import time
from collections.abc import Callable

from contract.domain.errors import ErrorCode, PenstockError, PoisonMessageError
from servicekit.bus.calls import Entry
from servicekit.bus.keys import PAYLOAD
from servicekit.hops import Hop
from worker_svc import wire
from worker_svc.core.epoch import EpochTracker, PlanVerdict
from worker_svc.core.stats import ExecutionStats
from worker_svc.execution import Epoch, Execution, Failure


class Plans:
    """Reads entries of the stream `steps`.

    position  of the last entry that was read
    hop       the time that plans take from the scheduler to here
    """

    def __init__(self, stats: ExecutionStats, bury: Callable[[Entry, str], None]) -> None:
        """`bury` is told of an entry that cannot be read, and why."""
        self.position = b"0-0"
        self.hop = Hop("steps")
        self._stats = stats
        self._bury = bury
        self._epoch: Epoch | None = None
        self._tracker = EpochTracker(None)

    @property
    def step(self) -> int:
        """The last one of its epoch that was taken."""
        return self._tracker.step

    def begin(self, position: bytes, incarnation: bytes) -> None:
        """Read on after `position`, and take the plans for this incarnation only."""
        if self._epoch is not None:
            self._epoch.is_superseded = True
        self._epoch, self.position = None, position
        self._tracker = EpochTracker(incarnation)

    def end(self, incarnation: bytes) -> None:
        """Take no more plans for this incarnation."""
        self._tracker.end(incarnation)

    def receive(self, entry: Entry, execution: Execution, received_ns: int) -> None:
        """Have the plan of an entry carried out, unless it is none for us; `received_ns` since 1970."""
        self.position = entry.entry_id
        begin_s = time.perf_counter()
        try:
            received = wire.decode_plan(entry.fields.get(PAYLOAD, b""))
        except PoisonMessageError as error:
            self._bury(entry, str(error))
            step = self._tracker.step + 1
            self._tracker.end()
            message = f"a plan cannot be read: {error}"
            execution.fail(Failure(self._epoch, step, PenstockError(ErrorCode.INTERNAL, message)))
            return
        plan = received.plan
        match self._tracker.admit(received.session, received.incarnation, plan.step):
            case PlanVerdict.DROP:
                return
            case PlanVerdict.GAP:
                epoch = Epoch(received.session, received.incarnation)
                error_ = PenstockError(ErrorCode.UNAVAILABLE, f"plans before step {plan.step} are missing")
                execution.fail(Failure(epoch, plan.step, error_))
                return
            case PlanVerdict.START:
                if self._epoch is not None:
                    self._epoch.is_superseded = True
                self._epoch = Epoch(received.session, received.incarnation)
                self._stats.num_pairings += 1
            case PlanVerdict.RUN:
                pass
        assert self._epoch is not None
        execution.submit(self._epoch, plan)
        self.hop.observe(received.sent_unix_ns, received_ns, time.perf_counter() - begin_s)
