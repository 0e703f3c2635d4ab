"""A step in which every sequence advances by one token, on device state alone: the host says which slots, no more."""

import torch
from torch import Tensor

from worker_svc.core.attention.triton_backend import TritonAttention
from worker_svc.core.batch import Batch
from worker_svc.core.decoder import DecodeOutput
from worker_svc.core.device_slots import DeviceSlots
from worker_svc.core.kernels.decode_attention import DecodeRows
from worker_svc.core.kernels.sampling import sample_tokens
from worker_svc.core.kernels.slots import decode_inputs, draw_inputs
from worker_svc.core.kernels.truncation import cutoffs
from worker_svc.core.models.llama import LlamaForCausalLM
from worker_svc.core.sampler import NO_CUTS, Cuts, Draw
from worker_svc.core.slots import I64
from worker_svc.core.transfer import upload


class DecodeStep:
    """embed -> layers -> logits -> sample -> move the slots on; launches kernels and nothing else."""

    def __init__(self, model: LlamaForCausalLM, attention: TritonAttention, state: DeviceSlots) -> None:
        self.state = state
        self._model = model
        self._attention = attention
        self._rows = torch.arange(len(state.num_computed), device=state.num_computed.device)

    def outline(self) -> "DecodeStep":
        """See `LlamaForCausalLM.outline`."""
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
    """See `Decoder`: launches each kernel by itself, and takes no small steps: nothing is gained by that."""

    def __init__(self, step: DecodeStep) -> None:
        self._step = step

    def decode(self, slots: I64) -> DecodeOutput:
        """See `Decoder.decode`."""
        (on_device,) = upload(self._step.state.num_computed.device, slots)
        return self._step(on_device)

    def draw(self, logits: Tensor, draw: Draw) -> Tensor:
        """See `Decoder.draw`."""
        return draw_tokens(logits, draw)

    def compute(self, batch: Batch) -> DecodeOutput | None:  # noqa: ARG002
        """See `Decoder.compute`."""
        return None

    def sample(self, logits: Tensor, slots: Tensor, positions: Tensor, cuts: Cuts = NO_CUTS) -> Tensor:
        """See `Decoder.sample`."""
        state = self._step.state
        asked = draw_inputs(slots, state)
        cut = None
        if cuts != NO_CUTS:
            cut = cutoffs(logits, asked.temperatures, asked.top_k, asked.top_p, asked.min_p, cuts)
        return sample_tokens(logits, asked.temperatures, asked.seeds, positions, cut, advance=(slots, state))


def draw_tokens(logits: Tensor, draw: Draw) -> Tensor:
    """Tokens i64[d] for logits f32[d, vocab_size]; those of `sampler.draw_tokens`, but where rounding decides."""
    truncation, min_p = draw.truncation, draw.min_p
    if truncation is None and min_p is None:
        return sample_tokens(logits, draw.temperature, draw.seeds, draw.positions)
    top_k, top_p = torch.zeros_like(draw.seeds), torch.ones_like(draw.temperature)
    if truncation is not None:
        top_k.index_copy_(0, truncation.rows, truncation.top_k)
        top_p.index_copy_(0, truncation.rows, truncation.top_p)
    cuts = Cuts(
        top_k=truncation is not None and truncation.has_top_k,
        top_p=truncation is not None and truncation.has_top_p,
        min_p=min_p is not None,
    )
    if min_p is None:
        min_p = torch.zeros_like(draw.temperature)
    cut = cutoffs(logits, draw.temperature, top_k, top_p, min_p, cuts)
    return sample_tokens(logits, draw.temperature, draw.seeds, draw.positions, cut)
