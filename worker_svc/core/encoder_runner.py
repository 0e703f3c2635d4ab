"""Carries out step plans on an encoder: prompts go up whole, vectors come down, and nothing stays on the device."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from contract.domain.plan import NO_TOKENS, StepPlan, StepResult
from worker_svc.core.batch import Batch
from worker_svc.core.current_device import CurrentDevice
from worker_svc.core.encoder import Encoder, PaddedPrompts, pad
from worker_svc.core.interface import DeviceError, Limits
from worker_svc.core.prompt_hidden import sum_hidden
from worker_svc.core.prompt_vectors import SlotVectors, VectorRows
from worker_svc.core.slots import I64
from worker_svc.core.timing import StepTiming
from worker_svc.core.transfer import Download, Downloads, upload
from worker_svc.core.whole_prompts import WholePrompts

_NONE = np.empty(0, np.int64)


class PendingEncoderStep:
    """Implement `PendingStep`."""

    def __init__(self, step: int, vectors: VectorRows | None, order: I64, download: Download, timing: StepTiming):
        self._step = step
        self._vectors = vectors
        self._order = order  # of the batch's prompts, in which their sums come down
        self._download = download
        self._timing = timing

    def result(self) -> StepResult:
        """Implement `PendingStep.result`."""
        try:
            step_ns, idle_ns = self._timing.read()
        except RuntimeError as error:
            raise DeviceError(self._step, error) from error
        if self._vectors is None:
            return StepResult(self._step, NO_TOKENS, NO_TOKENS, NO_TOKENS, step_ns=step_ns, idle_ns=idle_ns)
        came = self._download.take()[-1]
        sums = np.empty(came.shape, np.float32)
        sums[self._order] = came
        slots = self._vectors.finished_slots
        return StepResult(
            self._step,
            slots,
            np.zeros_like(slots),
            NO_TOKENS,
            step_ns=step_ns,
            idle_ns=idle_ns,
            vectors=self._vectors.complete(sums),
        )


class EncoderRunner:
    """Implement `Runner`: a step's prompts are computed in matrices of about equal lengths."""

    def __init__(self, model: Encoder, limits: Limits, device: torch.device, clock_ns: Callable[[], int]) -> None:
        """`clock_ns`: monotonic."""
        self._model = model
        self._limits = limits
        self._device = device
        self._clock_ns = clock_ns
        self._prompts = WholePrompts(limits)
        self._vectors = SlotVectors()
        self._downloads = Downloads(device, 1)
        self._last_timing: StepTiming | None = None
        self._current = CurrentDevice(self._device)

    @property
    def limits(self) -> Limits:
        """Implement `Runner.limits`."""
        return self._limits

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> PendingEncoderStep:
        """Implement `Runner.launch`.

        Raises:
            DeviceError: the device is of no further use.
        """
        self._current.enter()
        try:
            timing = StepTiming(self._device, self._clock_ns, self._last_timing)
            self._update(plan)
            batch, prompts = self._prompts.take(plan)
            vectors = self._vectors.take(batch)
            groups = pad(prompts, self._model.pad_token_id)
            sums = [self._sums(group, vectors, batch) for group in groups] if vectors is not None else []
            download = self._downloads.start([torch.empty(0, dtype=torch.int64), torch.cat(sums)] if sums else [])
            timing.stop()
        except torch.AcceleratorError as error:
            raise DeviceError(plan.step, error) from error
        self._last_timing = timing
        order = np.concatenate([_NONE, *(group.places for group in groups)])
        return PendingEncoderStep(plan.step, vectors, order, download, timing)

    def close(self) -> None:
        """Implement `Runner.close`."""
        del self._model

    def _update(self, plan: StepPlan) -> None:
        if plan.step == 1:
            self._vectors.clear()
        self._prompts.update(plan)
        self._vectors.release(plan.released_slots)
        for admission in plan.admissions:
            self._vectors.admit(admission)

    def _sums(self, group: PaddedPrompts, vectors: VectorRows, batch: Batch) -> Tensor:
        """f32[prompts, hidden_size]: of each prompt of a group, the sum of its hidden states that count."""
        ends = np.cumsum([share.num_rows for share in vectors.shares])  # a share for each prompt, in their order
        rows, counts = [], []
        for place, prompt in enumerate(group.places.tolist()):
            num_rows = vectors.shares[prompt].num_rows
            mine = vectors.rows[ends[prompt] - num_rows : ends[prompt]] - batch.query_starts[prompt]
            rows.append(group.rows(place, mine))
            counts.append(num_rows)
        of_rows = np.concatenate(rows), np.repeat(np.arange(len(counts)), counts)
        token_ids, lengths, firsts, wanted, owners = upload(
            self._device, group.token_ids, group.lengths, group.firsts, *of_rows
        )
        hidden = self._model.forward(group.on(token_ids, lengths, firsts)).flatten(0, 1)
        return sum_hidden(self._model, hidden[wanted], owners, len(counts))
