"""Carries out step plans on a model: state stays on the device, changes go up, results come down, nothing waits."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from llguidance import LLTokenizer
from torch import Tensor

from contract.domain.plan import F32, NO_TOKENS, U32, PromptLogprobs, StepPlan, StepResult
from worker_svc.core.attention.interface import AttentionBackend
from worker_svc.core.batch import Batch, advance, build_batch, tokens_of
from worker_svc.core.continuation import Continuation
from worker_svc.core.current_device import CurrentDevice
from worker_svc.core.device_decoding import DecodeOutput, DeviceDecoder
from worker_svc.core.device_grammars import DeviceGrammars
from worker_svc.core.device_slots import DeviceSlots
from worker_svc.core.grammars import SlotGrammars
from worker_svc.core.interface import DeviceError, Limits
from worker_svc.core.kernels.sampling.changes import TokenMasks
from worker_svc.core.kv_cache import KVCache
from worker_svc.core.language_model import LanguageModel
from worker_svc.core.prompt_hidden import sum_hidden
from worker_svc.core.prompt_logits import compute_prompt_logprobs
from worker_svc.core.prompt_logprobs import PromptRows, SlotPrompts
from worker_svc.core.prompt_vectors import SlotVectors, VectorRows
from worker_svc.core.result_logprobs import pack_logprobs
from worker_svc.core.sampler import Extras, Sampled, SamplerInput, chosen_logprobs, sample
from worker_svc.core.slot_sampling import SlotSampling
from worker_svc.core.slots import I64, HostSlots
from worker_svc.core.states.slot_states import SlotStates
from worker_svc.core.timing import StepTiming
from worker_svc.core.transfer import Download, Downloads, upload

_PROMPT_COLUMNS = 4  # see `compute_prompt_logprobs`
_MOST_COPIED = 16  # states


_NO_ROWS = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class _Prompts:
    """The uses of the hidden states of a step's prompts."""

    logprobs: PromptRows | None
    vectors: VectorRows | None

    @property
    def are_asked(self) -> bool:
        """Return whether anything is."""
        return self.logprobs is not None or self.vectors is not None

    @property
    def rows(self) -> I64:
        """i64[n]: the batch's rows that count, those for logprobs before those for vectors."""
        return np.concatenate([_NO_ROWS, *(each.rows for each in (self.logprobs, self.vectors) if each is not None)])

    @property
    def finished_slots(self) -> U32:
        """The slots whose prompts are pooled now."""
        return NO_TOKENS if self.vectors is None else self.vectors.finished_slots


_NO_PROMPTS = _Prompts(None, None)


@dataclass(frozen=True, slots=True)
class _Sampling:
    """The slots that sample in a step, as its result names them, and after them those whose prompts are pooled."""

    slots: U32
    counts: U32
    num_logprobs: I64
    failures: Mapping[int, str]  # as in `StepResult`
    chosen: Mapping[int, I64]  # by row, as `SlotSampling.chosen` says: their values are the column after the others
    prompts: _Prompts = _NO_PROMPTS  # whose values are the last columns

    @classmethod
    def of(cls, slots: I64, asked: SlotSampling, failures: Mapping[int, str], prompts: _Prompts) -> "_Sampling":
        counts, num_logprobs, named = np.ones(len(slots), np.uint32), asked.num_logprobs(slots), slots.astype(np.uint32)
        if len(pooled := prompts.finished_slots):
            named, counts = np.concatenate((named, pooled)), np.concatenate((counts, np.zeros_like(pooled)))
        return cls(named, counts, num_logprobs, failures, asked.chosen(slots), prompts)


@dataclass(frozen=True, slots=True)
class _Computed:
    """The end of a batch's layers."""

    hidden: Tensor  # [at least samples, hidden_size]
    slots: Tensor  # i64[samples]
    positions: Tensor  # i64[samples], of the tokens to be sampled


class PendingModelStep:
    """Implement `PendingStep`."""

    def __init__(self, step: int, sampling: _Sampling, download: Download, timing: StepTiming) -> None:
        self._step = step
        self._sampling = sampling
        self._download = download
        self._timing = timing

    def result(self) -> StepResult:
        """Implement `PendingStep.result`."""
        try:
            step_ns, idle_ns = self._timing.read()
        except RuntimeError as error:
            raise DeviceError(self._step, error) from error
        sampling, columns = self._sampling, self._download.take()
        asked = sampling.prompts
        prompts: Mapping[bytes, PromptLogprobs] = {}
        vectors: Mapping[bytes, F32] = {}
        if asked.vectors is not None:
            vectors, columns = asked.vectors.complete(columns[-1].astype(np.float32, copy=False)), columns[:-1]
        if asked.logprobs is not None:
            prompts, columns = asked.logprobs.complete(*columns[-_PROMPT_COLUMNS:]), columns[:-_PROMPT_COLUMNS]
        return StepResult(
            step=self._step,
            slots=sampling.slots,
            counts=sampling.counts,
            token_ids=columns[0].astype(np.uint32) if columns else NO_TOKENS,
            logprobs=pack_logprobs(sampling.num_logprobs, sampling.chosen, columns[1:]) if len(columns) > 1 else None,
            step_ns=step_ns,
            idle_ns=idle_ns,
            failures=sampling.failures,
            prompts=prompts,
            vectors=vectors,
        )


class ModelRunner:
    """Implement `Runner`. Every rank of a worker has one and launches the same plans."""

    def __init__(
        self,
        model: LanguageModel,
        cache: KVCache,
        attention: AttentionBackend,
        limits: Limits,
        clock_ns: Callable[[], int],
        *,
        make_decoder: Callable[[DeviceSlots], DeviceDecoder] | None = None,
        states: SlotStates | None = None,
    ) -> None:
        """Nothing is in a slot yet.

        Args:
            model: with its weights.
            cache: one block more than `limits` says, for rows that pad a batch, where there is a decoder.
            attention: over `cache`.
            limits: what plans must keep to.
            clock_ns: monotonic.
            make_decoder: what steps that only decode are left to, and the choice of tokens; None: torch does it all.
            states: of one slot more than `limits` says, and after it those that are saved; None: no layer keeps one.
        """
        self._model = model
        self._cache = cache
        self._states = states
        self._attention = attention
        self._limits = limits
        self._clock_ns = clock_ns
        self._device = cache.keys.device
        self._host = HostSlots(limits)
        self._slots = DeviceSlots(self._host, self._device)
        self._grammars = DeviceGrammars(SlotGrammars(None, limits.vocab_size), self._device)
        self._prompts = SlotPrompts(limits.vocab_size)
        self._vectors = SlotVectors()
        self._decoder = make_decoder(self._slots) if make_decoder is not None else None
        store = self._decoder.store if self._decoder is not None else None
        self._downloads = Downloads(self._device, limits.max_num_seqs, store)
        self._last_timing: StepTiming | None = None
        # Where the last step may just go on.
        self._going_on: tuple[Continuation, _Sampling, Extras | None] | None = None
        self._current = CurrentDevice(self._device)

    @property
    def limits(self) -> Limits:
        """Implement `Runner.limits`."""
        return self._limits

    def take_grammars(self, tokens: Callable[[], LLTokenizer]) -> None:
        """From now on sequences may have grammars, made of these tokens."""
        self._grammars = DeviceGrammars(SlotGrammars(tokens, self._limits.vocab_size), self._device)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> PendingModelStep:
        """Implement `Runner.launch`.

        Raises:
            DeviceError: the device is of no further use.
        """
        self._current.enter()
        try:
            timing = StepTiming(self._device, self._clock_ns, self._last_timing)
            self._update_slots(plan)
            if self._going_on is not None and self._going_on[0].covers(plan):
                outputs, sampling = self._go_on(*self._going_on)
            else:
                outputs, sampling = self._begin(plan)
            if len(plan.save_slots):
                self._copy_states(plan.save_slots.astype(np.int64), plan.save_states.astype(np.int64))
            download = self._downloads.start(outputs)
            timing.stop()
        except torch.AcceleratorError as error:
            raise DeviceError(plan.step, error) from error
        self._last_timing = timing
        return PendingModelStep(plan.step, sampling, download, timing)

    def close(self) -> None:
        """Implement `Runner.close`."""
        self._downloads.close()
        del self._model, self._cache, self._states, self._attention, self._slots, self._decoder, self._downloads

    def _go_on(self, batch: Continuation, sampling: _Sampling, extras: Extras | None) -> tuple[list[Tensor], _Sampling]:
        """Launch the step of a batch that is as it was."""
        assert self._decoder is not None
        outputs = _chosen(self._decoder, self._decoder.decode(batch.slots), extras)
        batch.advance()
        return outputs, sampling

    def _begin(self, plan: StepPlan) -> tuple[list[Tensor], _Sampling]:
        """Launch the step of any plan."""
        self._going_on = None
        batch = build_batch(plan.slots, plan.num_tokens, self._host, longest_first=self._decoder is not None)
        slots, positions, asked = batch.slots[batch.samples], batch.sample_positions, self._slots.sampling
        extras = asked.extras(slots, positions, self._device) if self._decoder is not None else None
        prompts = _Prompts(self._prompts.take(batch), self._vectors.take(batch))
        outputs = self._outputs(batch, extras, prompts)
        failures = self._grammars.follow(slots, outputs[0]) if outputs else {}
        advance(batch, self._host)
        sampling = _Sampling.of(slots, asked, failures, prompts)
        has_grammars = self._grammars.holds(slots)
        if self._decoder is not None and batch.num_tokens > 0 and batch.only_decodes and not has_grammars:
            going_on = Continuation(plan, batch, self._host, asked.num_alike(slots, positions))
            self._going_on = going_on, replace(sampling, prompts=_NO_PROMPTS), extras
        return outputs, sampling

    def _update_slots(self, plan: StepPlan) -> None:
        host, slots = self._host, self._slots
        if plan.step == 1:
            host.clear()
            self._grammars.clear()
            self._prompts.clear()
            self._vectors.clear()
        # Most plans have none of these.
        if len(plan.released_slots):
            host.release(plan.released_slots)
            self._grammars.release(plan.released_slots)
            self._prompts.release(plan.released_slots)
            self._vectors.release(plan.released_slots)
        if plan.admissions:
            for admission in plan.admissions:
                host.admit(admission)
                self._prompts.admit(admission)
                self._vectors.admit(admission)
            slots.admit(plan.admissions)
            self._grammars.admit(plan.admissions)
        if len(plan.append_slots):
            for updates in host.append(plan):
                slots.write_blocks(updates)
        if len(plan.copy_sources):
            host.check_copies(plan)
            sources = plan.copy_sources.astype(np.int64)
            self._cache.copy_blocks(*upload(self._device, sources, plan.copy_targets.astype(np.int64)))
        copies = [(each.source_state, each.slot) for each in plan.admissions if each.source_state is not None]
        if copies:
            self._copy_states(*np.array(copies, np.int64).T)
        if len(plan.save_slots):
            host.check_saves(plan)

    def _copy_states(self, sources: I64, targets: I64) -> None:
        """Copy states by their indices in plans."""
        assert self._states is not None
        # Those that are saved stand after the one for rows that pad a batch.
        sources, targets = (each + (each >= self._limits.max_num_seqs) for each in (sources, targets))
        # Few at a time, since what is read takes memory, unless some are read and written.
        num_parts = 1 if np.isin(sources, targets).any() else -(-len(sources) // _MOST_COPIED)
        for part in zip(*(np.array_split(each, num_parts) for each in (sources, targets)), strict=True):
            self._states.copy(*upload(self._device, *part))

    def _outputs(self, batch: Batch, extras: Extras | None, prompts: _Prompts) -> list[Tensor]:
        """The sampled tokens and, where asked for, their logprobs, those of prompts and what vectors are made of, on
        the device; the tokens are in the histories.
        """
        if batch.num_tokens == 0:
            return []
        decoder, output = self._decoder, None
        if decoder is not None and not batch.only_decodes:
            output = decoder.compute(batch, prompts.rows)
        # Unless that took what enters the tables along.
        self._slots.enter()
        if decoder is not None and batch.only_decodes and not prompts.are_asked:
            output = decoder.decode(batch.slots)
        if output is not None:
            hidden = output.hidden
        else:
            computed = self._compute(batch, prompts.rows)
            output, hidden = self._logits(batch, computed), computed.hidden
        chosen = [] if output is None else self._choose(batch, output, extras)
        if not prompts.are_asked:
            return chosen
        assert hidden is not None
        num_samples = len(batch.samples)
        of_prompts = self._of_prompts(hidden[num_samples : num_samples + len(prompts.rows)], prompts)
        return [*(chosen or [torch.empty(0, dtype=torch.int64, device=self._device)]), *of_prompts]

    def _of_prompts(self, hidden: Tensor, prompts: _Prompts) -> list[Tensor]:
        """The columns that are made of hidden states [n, hidden_size] of `prompts.rows`."""
        columns = []
        if (asked := prompts.logprobs) is not None:
            (token_ids,) = upload(self._device, asked.token_ids)
            columns = compute_prompt_logprobs(self._model, hidden[: len(token_ids)], token_ids, asked.num_top)
            hidden = hidden[len(token_ids) :]
        if (pooled := prompts.vectors) is not None:
            (owners,) = upload(self._device, pooled.owners)
            columns.append(sum_hidden(self._model, hidden, owners, len(pooled.shares)))
        return columns

    def _choose(self, batch: Batch, output: DecodeOutput, extras: Extras | None) -> list[Tensor]:
        """The tokens of the sequences that sample."""
        if len(batch.samples) == 0:
            return []
        decoder = self._decoder
        masks = self._grammars.masks(batch.slots[batch.samples])
        if decoder is None:
            return self._sample(batch, output, masks)
        return _chosen(decoder, output, extras.masked(masks) if extras is not None else None)

    def _compute(self, batch: Batch, rows: I64) -> _Computed:
        """Operation by operation; nobody has chosen tokens then. Hidden states are those of the sequences that sample,
        and after them those of further `rows` i64[n] of the batch.
        """
        tokens = tokens_of(batch, self._host)
        token_slots, positions, slots, contexts, wanted_rows, sample_slots, sample_positions, *slot_mappings = upload(
            self._device,
            tokens.slots,
            tokens.positions,
            batch.slots,
            batch.context_lens,
            np.concatenate((batch.query_starts[batch.samples + 1] - 1, rows)),
            batch.slots[batch.samples],
            batch.sample_positions,
            *tokens.slot_mappings,
        )
        token_ids = self._slots.tokens[token_slots, positions].long()
        attention = self._attention.prepare(batch, positions, slot_mappings, self._slots.block_tables)
        hidden = self._model.forward(token_ids, attention, wanted_rows)
        self._slots.advance(slots, contexts)
        return _Computed(hidden, sample_slots, sample_positions)

    def _logits(self, batch: Batch, computed: _Computed) -> DecodeOutput | None:
        """The logits of the sequences that sample; None: there are none."""
        if len(batch.samples) == 0:
            return None
        logits = self._model.logits(computed.hidden[: len(batch.samples)])
        return DecodeOutput(logits, None, computed.slots, computed.positions)

    def _sample(self, batch: Batch, output: DecodeOutput, masks: TokenMasks | None) -> list[Tensor]:
        """Without a decoder."""
        slots = batch.slots[batch.samples]
        asked = self._slots.sampling.sampler_input(slots, batch.sample_positions, self._slots.tokens)
        sampled = sample(output.logits.float(), asked.masked(masks))
        self._slots.write_tokens(output.slots, output.positions, sampled.token_ids)
        return _columns(sampled) + _chosen_columns(output.logits, asked)


def _chosen(decoder: DeviceDecoder, output: DecodeOutput, extras: Extras | None) -> list[Tensor]:
    """Choose what temperatures alone decide, if it is not chosen already; where a row asks for more, choose in place of
    these before anything reads them.
    """
    if extras is None and output.token_ids is not None:
        return [output.token_ids]
    of_chosen = _chosen_columns(output.logits, extras)
    return _columns(decoder.sample(output.logits, output.slots, output.positions, extras)) + of_chosen


def _chosen_columns(logits: Tensor, asked: Extras | SamplerInput | None) -> list[Tensor]:
    """What rows ask of chosen tokens: before anything changes the logits."""
    return [] if asked is None or asked.chosen is None else [chosen_logprobs(logits, asked.chosen)]


def _columns(sampled: Sampled) -> list[Tensor]:
    columns = (sampled.token_ids, sampled.logprobs, sampled.ranks, sampled.top_ids, sampled.top_logprobs)
    return [column for column in columns if column is not None]
