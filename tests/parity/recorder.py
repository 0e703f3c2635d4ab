"""A runner that notes what it was asked to do, so that a case can prove what it switched on."""

import threading
from dataclasses import dataclass, field

import numpy as np

from contract.domain.plan import StepPlan, StepResult
from worker_svc.core.interface import Limits, PendingStep, Runner

GATE_TIMEOUT_S = 600.0


def open_gate() -> threading.Event:
    """A gate that holds nothing up."""
    gate = threading.Event()
    gate.set()
    return gate


@dataclass
class Recorder:
    """Passes everything on to `runner`, once `gate` is set."""

    runner: Runner
    gate: threading.Event = field(default_factory=open_gate)
    num_admissions: int = 0
    num_chunks: int = 0  # rows of plans that compute more than one token
    most_batched_tokens: int = 0
    most_in_flight: int = 0
    in_flight: int = 0

    @property
    def limits(self) -> Limits:
        return self.runner.limits

    def launch(self, plan: StepPlan) -> "RecordedStep":
        assert self.gate.wait(GATE_TIMEOUT_S)
        self.num_admissions += len(plan.admissions)
        self.num_chunks += int(np.count_nonzero(plan.num_tokens > 1))
        self.most_batched_tokens = max(self.most_batched_tokens, int(plan.num_tokens.sum()))
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        return RecordedStep(self, self.runner.launch(plan))

    def close(self) -> None:
        self.runner.close()


@dataclass
class RecordedStep:
    """A step that tells when its result is taken."""

    recorder: Recorder
    pending: PendingStep
    taken: bool = False

    def result(self) -> StepResult:
        self.recorder.in_flight -= not self.taken
        self.taken = True
        return self.pending.result()
