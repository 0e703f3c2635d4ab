"""An encoder that is only pretended: each hidden state follows from all tokens of its prompt, and its position."""

from collections.abc import Callable

import numpy as np

from contract.domain.model_kind import ModelKind
from contract.domain.plan import NO_TOKENS, StepPlan, StepResult
from worker_svc.core.interface import Limits
from worker_svc.core.pretended_model import encoder_hashes, hidden_states
from worker_svc.core.prompt_vectors import SlotVectors
from worker_svc.core.simulated import PendingSimulatedStep, SimulatedConfig
from worker_svc.core.whole_prompts import WholePrompts


class SimulatedEncoder:
    """Implement `Runner`. The device begins a step when the one before has ended; `sleep` takes seconds."""

    def __init__(
        self, limits: Limits, config: SimulatedConfig, clock_ns: Callable[[], int], sleep: Callable[[float], None]
    ) -> None:
        self._limits = limits
        self._config = config
        self._clock_ns = clock_ns
        self._sleep = sleep
        self._step_ns = round(config.step_s * 1e9)
        self._device_free_ns: int | None = None
        self._prompts = WholePrompts(limits)
        self._pooled = SlotVectors()

    @property
    def limits(self) -> Limits:
        """Implement `Runner.limits`."""
        return self._limits

    def launch(self, plan: StepPlan) -> PendingSimulatedStep:
        """Implement `Runner.launch`."""
        now_ns = self._clock_ns()
        free_ns = now_ns if self._device_free_ns is None else self._device_free_ns
        start_ns = max(now_ns, free_ns)
        if plan.step == 1:
            self._pooled.clear()
        self._prompts.update(plan)
        self._pooled.release(plan.released_slots)
        for admission in plan.admissions:
            self._pooled.admit(admission)
        batch, prompts = self._prompts.take(plan)
        rows = self._pooled.take(batch)
        self._device_free_ns = start_ns + self._step_ns
        slots, vectors = NO_TOKENS, {}
        if rows is not None:
            hashes = np.concatenate([encoder_hashes(*prompt) for prompt in prompts])[rows.rows]
            size = 1 if self._limits.model_kind is ModelKind.CROSS_ENCODER else self._config.hidden_size
            sums = np.zeros((len(rows.shares), size), np.float32)
            hidden = hidden_states(hashes, size, self._config.model_seed)
            np.add.at(sums, rows.owners, hidden)
            slots, vectors = rows.finished_slots, dict(rows.complete(sums))
        result = StepResult(
            step=plan.step,
            slots=slots,
            counts=np.zeros_like(slots),
            token_ids=NO_TOKENS,
            step_ns=self._step_ns,
            idle_ns=start_ns - free_ns,
            vectors=vectors,
        )
        return PendingSimulatedStep(result, self._device_free_ns, self._clock_ns, self._sleep)

    def close(self) -> None:
        """Implement `Runner.close`."""
