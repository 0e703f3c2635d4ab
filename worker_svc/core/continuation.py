"""A batch that plans go on with: most say no more than that the same sequences advance by one token again."""

import numpy as np

from contract.domain.plan import StepPlan
from worker_svc.core.batch import Batch
from worker_svc.core.slots import I64, HostSlots


class Continuation:
    """The facts of the next steps of a batch that only decodes, so that nothing of it is found out again."""

    def __init__(self, plan: StepPlan, batch: Batch, state: HostSlots, num_alike: int) -> None:
        """`batch` was made of `plan` and is launched; `state` has been moved on.

        num_alike: for how many steps in a row, of which the launched one is the first, the sampler is asked for the
        same.
        """
        self.slots: I64 = batch.slots
        self._state = state
        self._planned = plan.slots.tobytes(), plan.num_tokens.tobytes()
        self._room = self._count_room()
        self._num_alike = num_alike - 1

    def covers(self, plan: StepPlan) -> bool:
        """Return whether `plan`, whose blocks are in the tables already, advances the same slots by one token each, and
        each has room for it and asks the sampler for the same.
        """
        is_more = plan.step == 1 or plan.admissions or len(plan.released_slots)
        if is_more or self._planned != (plan.slots.tobytes(), plan.num_tokens.tobytes()):
            return False
        if len(plan.append_slots):
            self._room = self._count_room()
        return self._room > 0 and self._num_alike > 0

    def advance(self) -> None:
        """Move the slots' counts on as `batch.advance` does."""
        self._state.num_computed[self.slots] += 1
        self._state.num_tokens[self.slots] += 1
        self._room -= 1
        self._num_alike -= 1

    def _count_room(self) -> int:
        """The number of tokens by which every slot can advance in the blocks and the context that it has."""
        state, limits = self._state, self._state.limits
        ends = np.minimum(state.room[self.slots], limits.max_model_len)
        return int((ends - state.num_computed[self.slots]).min())
