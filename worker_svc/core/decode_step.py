"""A step in which every sequence advances by one token, on device state alone: the host says which slots, no more."""

import torch
from torch import Tensor

from worker_svc.core.attention.triton_backend import TritonAttention
from worker_svc.core.batch import Batch
from worker_svc.core.causal_lm import CausalLM
from worker_svc.core.device_decoding import DecodeOutput
from worker_svc.core.device_slots import DeviceSlots
from worker_svc.core.kernels.attention.decode import DecodeRows
from worker_svc.core.kernels.sampling.draw import sample_tokens
from worker_svc.core.kernels.sampling.logprobs import token_logprobs
from worker_svc.core.kernels.sampling.penalties import changed_logits
from worker_svc.core.kernels.sampling.truncation import cutoffs
from worker_svc.core.kernels.state.inputs import decode_inputs, draw_inputs
from worker_svc.core.kernels.state.landing import store_on_host
from worker_svc.core.sampler import Extras, Sampled
from worker_svc.core.slots import I64
from worker_svc.core.transfer import upload

_NO_EXTRAS = Extras()


class DecodeStep:
    """embed -> layers -> logits -> sample -> move the slots on; launches kernels and nothing else."""

    def __init__(self, model: CausalLM, attention: TritonAttention, state: DeviceSlots) -> None:
        self.state = state
        self._model = model
        self._attention = attention
        self._rows = torch.arange(len(state.num_computed), device=state.num_computed.device)

    def outline(self) -> "DecodeStep":
        """See `CausalLM.outline`."""
        return DecodeStep(self._model.outline(), self._attention, self.state)

    def __call__(self, slots: Tensor) -> DecodeOutput:
        """The next token of each of `slots` i64[rows]; a row of the dummy slot changes nothing."""
        inputs = decode_inputs(slots, self.state, self._model.embedding_table)
        rows = DecodeRows(self._rows[: len(slots)], slots, inputs.contexts)
        attention = self._attention.prepare_decode(rows, self.state.block_tables)
        hidden = inputs.hidden if inputs.hidden is not None else self._model.embed(inputs.token_ids)
        logits = self._model.logits(self._model.transform(hidden, attention))
        advance = slots, self.state
        token_ids = sample_tokens(logits, inputs.temperatures, inputs.seeds, inputs.contexts, advance=advance)
        return DecodeOutput(logits, token_ids, slots, inputs.contexts)


class StepDecoder:
    """Implement `DeviceDecoder`: launches each kernel by itself, and takes no small steps, which gain nothing."""

    def __init__(self, step: DecodeStep) -> None:
        self._step = step

    def decode(self, slots: I64) -> DecodeOutput:
        """Implement `DeviceDecoder.decode`."""
        (on_device,) = upload(self._step.state.num_computed.device, slots)
        return self._step(on_device)

    def compute(self, batch: Batch, rows: I64) -> DecodeOutput | None:  # noqa: ARG002
        """Implement `DeviceDecoder.compute`."""
        return None

    def sample(self, logits: Tensor, slots: Tensor, positions: Tensor, extras: Extras | None) -> Sampled:
        """Implement `DeviceDecoder.sample`."""
        state, extras = self._step.state, extras or _NO_EXTRAS
        asked = draw_inputs(slots, state)
        changed = changed_logits(
            logits, slots, positions, state, has_penalties=extras.has_penalties, changes=extras.changes
        )
        cut = None
        if extras.has_cuts:
            cut = cutoffs(changed, asked.temperatures, asked.top_k, asked.top_p, asked.min_p)
        token_ids = sample_tokens(changed, asked.temperatures, asked.seeds, positions, cut, advance=(slots, state))
        if extras.logprob_rows is None:
            return Sampled(token_ids)
        return Sampled(token_ids, *token_logprobs(logits, token_ids, extras.logprob_rows, extras.num_top_logprobs))

    def store(self, tokens: Tensor, target: Tensor) -> None:
        """Implement `DeviceDecoder.store`."""
        store_on_host(tokens, target)
