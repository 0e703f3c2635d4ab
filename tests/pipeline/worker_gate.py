"""A worker whose steps wait for the test."""

import threading
from dataclasses import dataclass, field, replace

from contract.domain.plan import StepPlan
from worker_svc.core.interface import Limits, PendingStep, Runner
from worker_svc.loading import LoadedWorker, load_worker
from worker_svc.settings import WorkerSettings

LIMIT_S = 1200.0  # for which a step waits: then its test has failed


@dataclass
class Gate:
    """Holds a worker's steps until it is open."""

    is_open: bool = False
    _is_waiting: bool = False  # a step is
    _steps: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def load(self, settings: WorkerSettings) -> LoadedWorker:
        """A worker's runner, behind the gate."""
        loaded = load_worker(settings)
        return replace(loaded, runner=_Gated(loaded.runner, self))

    def open(self) -> None:
        """Let all steps pass."""
        self.is_open = True
        self._steps.release()

    def let_one_pass(self) -> None:
        """Let the step pass that waits now, if one does."""
        if self._is_waiting:
            self._is_waiting = False
            self._steps.release()

    def wait(self) -> None:
        """Return once a step may pass."""
        if not self.is_open:
            self._is_waiting = True
            assert self._steps.acquire(timeout=LIMIT_S), "the gate was not opened"


@dataclass
class _Gated:
    inner: Runner
    gate: Gate

    @property
    def limits(self) -> Limits:
        return self.inner.limits

    def launch(self, plan: StepPlan) -> PendingStep:
        self.gate.wait()
        return self.inner.launch(plan)

    def close(self) -> None:
        self.inner.close()
