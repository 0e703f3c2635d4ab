"""An encoder that is only pretended: each hidden state follows from all tokens of its prompt, and its position."""

from collections.abc import Callable

import numpy as np

from contract.domain.model_kind import ModelKind
from contract.domain.plan import NO_TOKENS, StepPlan, StepResult
from worker_svc.core.interface import Limits
from worker_svc.core.pretended_device import PendingSimulatedStep, PretendedDevice
from worker_svc.core.pretended_model import encoder_hashes, hidden_states
from worker_svc.core.prompt_vectors import SlotVectors
from worker_svc.core.simulated import SimulatedConfig
from worker_svc.core.whole_prompts import WholePrompts


class SimulatedEncoder:
    """Implement `Runner`. The device begins a step when the one before has ended; `sleep` takes seconds."""

    def __init__(
        self, limits: Limits, config: SimulatedConfig, clock_ns: Callable[[], int], sleep: Callable[[float], None]
    ) -> None:
        self._limits = limits
        self._config = config
        self._device = PretendedDevice(config.step_s, clock_ns, sleep)
        self._prompts = WholePrompts(limits)
        self._pooled = SlotVectors()

    @property
    def limits(self) -> Limits:
        """Implement `Runner.limits`."""
        return self._limits

    def launch(self, plan: StepPlan) -> PendingSimulatedStep:
        """Implement `Runner.launch`."""
        times = self._device.next_step()
        if plan.step == 1:
            self._pooled.clear()
        self._prompts.update(plan)
        self._pooled.release(plan.released_slots)
        for admission in plan.admissions:
            self._pooled.admit(admission)
        batch, prompts = self._prompts.take(plan)
        rows = self._pooled.take(batch)
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
            step_ns=times.step_ns,
            idle_ns=times.idle_ns,
            vectors=vectors,
        )
        return self._device.launch(times, result)

    def close(self) -> None:
        """Implement `Runner.close`."""
