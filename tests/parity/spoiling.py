"""A runner in which nothing is left where nobody has anything: blocks and states that are free are NaN."""

from dataclasses import dataclass

import torch
from torch import Tensor

from contract.domain.plan import StepPlan
from scheduler_svc.core.worker import WorkerState
from worker_svc.core.interface import Limits, PendingStep
from worker_svc.core.runner import ModelRunner

_NAN_OF_8_BITS = 0x7F  # of e4m3fn


@dataclass
class SpoilingRunner:
    """Fills blocks that nobody holds and nobody can find with NaN, as soon as the plan that left them is launched, and
    states of slots without a sequence, and those that stand for no prefix."""

    runner: ModelRunner
    worker: WorkerState
    num_spoiled: int = 0  # blocks
    num_spoiled_states: int = 0

    @property
    def limits(self) -> Limits:
        return self.runner.limits

    def launch(self, plan: StepPlan) -> PendingStep:
        step = self.runner.launch(plan)
        cache, empty = self.runner._cache, self.worker.blocks.empty
        for cells in (cache.keys, cache.values):
            _spoil(cells.unflatten(1, (-1, self.limits.num_pages)), empty)
        self.num_spoiled += len(empty)
        if (states := self.runner._states) is not None:
            # Those that are saved stand after the one for rows that pad a batch.
            free = self.worker.free_slots + [index + 1 for index in self.worker.states.empty]
            _spoil(states.seen, free)
            _spoil(states.matrices, free)
            self.num_spoiled_states += len(free)
        return step

    def close(self) -> None:
        self.runner.close()


def _spoil(cells: Tensor, places: list[int]) -> None:
    """Fill [layers, places, ...] there."""
    if cells.element_size() == 1:
        cells.view(torch.uint8)[:, places] = _NAN_OF_8_BITS
    else:
        cells[:, places] = torch.nan
