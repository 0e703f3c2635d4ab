"""A step in which every sequence advances by one token, on device state alone: the host says which slots, no more."""

import torch
from torch import Tensor

from worker_svc.core.attention.triton_backend import TritonAttention
from worker_svc.core.decoder import DecodeOutput
from worker_svc.core.device_slots import DeviceSlots
from worker_svc.core.kernels.decode_attention import DecodeRows
from worker_svc.core.kernels.sampling import sample_tokens
from worker_svc.core.kernels.slots import advance, decode_inputs
from worker_svc.core.models.llama import LlamaForCausalLM
from worker_svc.core.slots import I64
from worker_svc.core.transfer import upload


class DecodeStep:
    """embed -> layers -> logits -> sample -> move the slots on; launches kernels and nothing else."""

    def __init__(self, model: LlamaForCausalLM, attention: TritonAttention, state: DeviceSlots) -> None:
        self.state = state
        self._model = model
        self._attention = attention
        self._rows = torch.arange(len(state.num_computed), device=state.num_computed.device)

    def __call__(self, slots: Tensor) -> DecodeOutput:
        """The next token of each of `slots` i64[rows]; a row of the dummy slot changes nothing."""
        inputs = decode_inputs(slots, self.state)
        rows = DecodeRows(self._rows[: len(slots)], slots, inputs.contexts)
        attention = self._attention.prepare_decode(rows, self.state.block_tables)
        logits = self._model.logits(self._model.forward(inputs.token_ids, attention))
        token_ids = sample_tokens(logits, inputs.temperatures, inputs.seeds, inputs.contexts)
        advance(slots, inputs.contexts, token_ids, self.state)
        return DecodeOutput(logits, token_ids)


class StepDecoder:
    """See `Decoder`: launches each kernel by itself."""

    def __init__(self, step: DecodeStep) -> None:
        self._step = step

    def decode(self, slots: I64) -> DecodeOutput:
        """See `Decoder.decode`."""
        (on_device,) = upload(self._step.state.num_computed.device, slots)
        return self._step(on_device)

    def sample(self, logits: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """See `Decoder.sample`."""
        return sample_tokens(logits, *self._step.state.draws(slots), positions)
