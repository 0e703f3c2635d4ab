"""Plans in flight, and results that contradict them."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from contract.domain.errors import ErrorCode, PenstockError

I64 = npt.NDArray[np.int64]


class StepError(PenstockError):
    """A result that contradicts the plans: the epoch of this worker must end."""

    def __init__(self, worker_id: str, message: str) -> None:
        super().__init__(ErrorCode.INTERNAL, f"worker {worker_id}: {message}; pair with it anew")


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A plan in flight: what is needed to read its result."""

    step: int
    slots: I64  # [sampling]: slots that reach the tip of their tokens and sample
    generations: I64  # [sampling]: occupants of these slots when it was planned
    issued_ns: int
