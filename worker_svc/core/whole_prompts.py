"""The prompts in an encoder's slots, each of which is computed in one step."""

from typing import NamedTuple

import numpy as np

from contract.domain.plan import Admission, StepPlan
from contract.domain.pooling import is_done_by
from worker_svc.core.batch import Batch
from worker_svc.core.interface import Limits, plan_error
from worker_svc.core.slots import I64

_NONE = np.empty(0, np.int64)


class WholePrompt(NamedTuple):
    """A prompt, or a pair of texts."""

    token_ids: I64  # [tokens]
    num_first: int = 0  # as in `Admission.num_first_tokens`


class WholePrompts:
    """Those that are to be computed."""

    def __init__(self, limits: Limits) -> None:
        """There are none."""
        self._limits = limits
        self._prompts: dict[int, WholePrompt] = {}
        self._taken: set[int] = set()  # slots

    def update(self, plan: StepPlan) -> None:
        """Let sequences leave their slots, and others enter.

        Raises:
            PenstockError: INTERNAL: the plan contradicts the slots, or asks for what an encoder does not do.
        """
        if plan.step == 1:
            self._prompts.clear()
            self._taken.clear()
        for slot in plan.released_slots.tolist():
            if slot not in self._taken:
                raise plan_error(f"it releases slot {slot}, which is empty or not there")
            self._taken.remove(slot)
            self._prompts.pop(slot, None)
        for admission in plan.admissions:
            self._admit(admission)

    def _admit(self, admission: Admission) -> None:
        slot, limits, token_ids = admission.slot, self._limits, admission.token_ids
        if slot >= limits.max_num_seqs or slot in self._taken:
            raise plan_error(f"a sequence enters slot {slot}, which is taken or not there")
        if not is_done_by(limits.model_kind, admission.pooling):
            raise plan_error(f"slot {slot} is to do what the model does not")
        if admission.num_prompt_tokens != len(token_ids) or admission.num_computed_tokens:
            raise plan_error(f"slot {slot} has generated, or has a prompt of which a part is computed")
        if not 0 < len(token_ids) <= limits.max_model_len or int(token_ids.max()) >= limits.vocab_size:
            raise plan_error(f"slot {slot} gets {len(token_ids)} tokens, or some outside the vocabulary")
        self._taken.add(slot)
        self._prompts[slot] = WholePrompt(token_ids.astype(np.int64), admission.num_first_tokens)

    def take(self, plan: StepPlan) -> tuple[Batch, list[WholePrompt]]:
        """The prompts that a plan computes, and its batch; none of them can be computed again.

        Raises:
            PenstockError: INTERNAL: a prompt is not there, or is not computed whole; or they are more than fit a step.
        """
        prompts = []
        for slot, num_tokens in zip(plan.slots.tolist(), plan.num_tokens.tolist(), strict=True):
            prompt = self._prompts.pop(slot, None)
            if prompt is None or len(prompt.token_ids) != num_tokens:
                raise plan_error(f"it computes {num_tokens} tokens of slot {slot}, which are not all of a prompt there")
            prompts.append(prompt)
        lengths = plan.num_tokens.astype(np.int64)
        starts = np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths)))
        if starts[-1] > self._limits.max_num_batched_tokens:
            raise plan_error("it computes more tokens than a step may have")
        return Batch(plan.slots.astype(np.int64), lengths, starts, lengths, _NONE, _NONE), prompts
