"""Carries out step plans on a model: state stays on the device, changes go up, results come down, nothing waits."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from penstock.domain.plan import NO_TOKENS, Logprobs, StepPlan, StepResult
from worker_svc.core.attention.interface import AttentionBackend
from worker_svc.core.batch import Batch, advance, build_batch
from worker_svc.core.device_slots import DeviceSlots
from worker_svc.core.interface import DeviceError, Limits
from worker_svc.core.kv_cache import KVCache
from worker_svc.core.models.llama import LlamaForCausalLM
from worker_svc.core.sampler import Sampled, sample
from worker_svc.core.slots import I64, HostSlots
from worker_svc.core.timing import StepTiming
from worker_svc.core.transfer import Download, upload


class PendingModelStep:
    """See `PendingStep`."""

    def __init__(self, step: int, slots: I64, num_logprobs: I64, download: Download, timing: StepTiming) -> None:
        self._step = step
        self._slots = slots
        self._num_logprobs = num_logprobs
        self._download = download
        self._timing = timing

    def result(self) -> StepResult:
        """See `PendingStep.result`."""
        try:
            columns = self._download.wait()
            step_ns, idle_ns = self._timing.read()
        except RuntimeError as error:
            raise DeviceError(self._step, error) from error
        return StepResult(
            step=self._step,
            slots=self._slots.astype(np.uint32),
            counts=np.ones(len(self._slots), np.uint32),
            token_ids=columns[0].astype(np.uint32) if columns else NO_TOKENS,
            logprobs=_pack_logprobs(self._num_logprobs, *columns[1:]) if len(columns) > 1 else None,
            step_ns=step_ns,
            idle_ns=idle_ns,
        )


class ModelRunner:
    """See `Runner`. Every rank of a worker has one and launches the same plans."""

    def __init__(
        self,
        model: LlamaForCausalLM,
        cache: KVCache,
        attention: AttentionBackend,
        limits: Limits,
        clock_ns: Callable[[], int],
    ) -> None:
        self._model = model
        self._cache = cache
        self._attention = attention
        self._limits = limits
        self._clock_ns = clock_ns
        self._device = cache.keys.device
        self._host = HostSlots(limits)
        self._slots = DeviceSlots(self._host, self._device)
        self._last_timing: StepTiming | None = None

    @property
    def limits(self) -> Limits:
        """See `Runner.limits`."""
        return self._limits

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> PendingModelStep:
        """See `Runner.launch`.

        Raises:
            DeviceError: the device is of no further use.
        """
        if self._device.type == "cuda":
            # Events are recorded on the current device's stream, and which device is current is up to each thread.
            torch.cuda.set_device(self._device)
        try:
            timing = StepTiming(self._device, self._clock_ns, self._last_timing)
            self._update_slots(plan)
            batch = build_batch(plan.slots, plan.num_tokens, self._host)
            outputs = self._compute(batch)
            advance(batch, self._host)
            timing.stop()
            sampled_slots = batch.slots[batch.samples]
            pending = PendingModelStep(
                plan.step, sampled_slots, self._slots.num_logprobs(sampled_slots), Download(outputs), timing
            )
        except torch.AcceleratorError as error:
            raise DeviceError(plan.step, error) from error
        self._last_timing = timing
        return pending

    def close(self) -> None:
        """See `Runner.close`."""
        del self._model, self._cache, self._attention, self._slots

    def _update_slots(self, plan: StepPlan) -> None:
        host, slots = self._host, self._slots
        if plan.step == 1:
            host.clear()
        host.release(plan.released_slots)
        for admission in plan.admissions:
            host.admit(admission)
        slots.admit(plan.admissions)
        slots.write_blocks(host.append(plan))
        slots.write_blocks(host.replace(plan))
        host.check_copies(plan)
        if len(plan.copy_sources):
            sources = plan.copy_sources.astype(np.int64)
            self._cache.copy_blocks(*upload(self._device, sources, plan.copy_targets.astype(np.int64)))

    def _compute(self, batch: Batch) -> list[Tensor]:
        """The sampled tokens and, where asked for, their logprobs, on the device; the tokens are in the histories."""
        if batch.num_tokens == 0:
            return []
        token_slots, positions, slot_mapping, last_tokens, sample_slots, sample_positions = upload(
            self._device,
            batch.token_slots,
            batch.positions,
            batch.slot_mapping,
            batch.query_starts[batch.samples + 1] - 1,
            batch.slots[batch.samples],
            batch.sample_positions,
        )
        token_ids = self._slots.tokens[token_slots, positions].long()
        attention = self._attention.prepare(batch, positions, slot_mapping, self._slots.block_tables)
        hidden = self._model.forward(token_ids, attention)
        if len(batch.samples) == 0:
            return []
        logits = self._model.logits(hidden[last_tokens]).float()
        asked = self._slots.sampler_input(batch, sample_slots, sample_positions)
        sampled = sample(logits, asked)
        self._slots.write_tokens(sample_slots, sample_positions, sampled.token_ids)
        return _outputs(sampled)


def _outputs(sampled: Sampled) -> list[Tensor]:
    columns = (sampled.token_ids, sampled.logprobs, sampled.top_ids, sampled.top_logprobs)
    return [column for column in columns if column is not None]


def _pack_logprobs(num_logprobs: I64, own: np.ndarray, top_ids: np.ndarray, top_logprobs: np.ndarray) -> Logprobs:
    """Rows that asked stand in `own` [l] and the tops [l, most]; `num_logprobs` i64[rows] is -1 for the others."""
    asked = num_logprobs >= 0
    sampled = np.full(len(num_logprobs), np.nan, np.float32)
    sampled[asked] = own
    counts = np.maximum(num_logprobs, 0)
    kept = np.arange(top_ids.shape[1]) < counts[asked][:, None]
    return Logprobs(sampled, counts.astype(np.uint32), top_ids[kept].astype(np.uint32), top_logprobs[kept])
