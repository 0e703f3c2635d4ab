"""The state of decoding slots: read into the columns of a batch before a step, moved on behind it."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker_svc.core.device_slots import SEED_COLUMN, DeviceSlots
from worker_svc.core.kernels.launch import options

_BLOCK = 128


@triton.jit
def _decode_inputs(
    slots_ptr,  # i64[rows]
    num_computed_ptr,  # i64[slots]
    tokens_ptr,  # i32[slots, tokens]
    floats_ptr,  # f32[slots, FLOATS], the first is the temperature
    integers_ptr,  # i64[slots, INTEGERS], column SEED is the seed
    token_ids_ptr,  # i64[rows]
    contexts_ptr,  # i64[rows]
    temperatures_ptr,  # f32[rows]
    seeds_ptr,  # i64[rows]
    tokens_stride,
    num_rows,
    FLOATS: tl.constexpr,
    INTEGERS: tl.constexpr,
    SEED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = rows < num_rows
    slots = tl.load(slots_ptr + rows, mask=is_row, other=0)
    positions = tl.load(num_computed_ptr + slots, mask=is_row, other=0)
    token_ids = tl.load(tokens_ptr + slots * tokens_stride + positions, mask=is_row, other=0)
    tl.store(token_ids_ptr + rows, token_ids.to(tl.int64), mask=is_row)
    tl.store(contexts_ptr + rows, positions + 1, mask=is_row)
    tl.store(temperatures_ptr + rows, tl.load(floats_ptr + slots * FLOATS, mask=is_row, other=0.0), mask=is_row)
    tl.store(seeds_ptr + rows, tl.load(integers_ptr + slots * INTEGERS + SEED, mask=is_row, other=0), mask=is_row)


@triton.jit
def _advance(
    slots_ptr,  # i64[rows]
    contexts_ptr,  # i64[rows]
    sampled_ptr,  # i64[rows]
    num_computed_ptr,  # i64[slots]
    tokens_ptr,  # i32[slots, tokens]
    tokens_stride,
    num_rows,
    dummy_slot,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slots = tl.load(slots_ptr + rows, mask=rows < num_rows, other=0)
    is_real = (rows < num_rows) & (slots != dummy_slot)
    contexts = tl.load(contexts_ptr + rows, mask=is_real, other=0)
    sampled = tl.load(sampled_ptr + rows, mask=is_real, other=0)
    tl.store(tokens_ptr + slots * tokens_stride + contexts, sampled.to(tl.int32), mask=is_real)
    tl.store(num_computed_ptr + slots, contexts, mask=is_real)


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """What one decode step computes; all [rows]."""

    token_ids: Tensor  # i64
    contexts: Tensor  # i64, tokens with KV once the step is done
    temperatures: Tensor  # f32
    seeds: Tensor  # i64


def decode_inputs(slots: Tensor, state: DeviceSlots) -> DecodeInputs:
    """The inputs of the step that computes the next token of each of `slots` i64[rows]."""
    rows, device = len(slots), slots.device
    inputs = DecodeInputs(
        torch.empty(rows, dtype=torch.int64, device=device),
        torch.empty(rows, dtype=torch.int64, device=device),
        torch.empty(rows, device=device),
        torch.empty(rows, dtype=torch.int64, device=device),
    )
    _decode_inputs[(triton.cdiv(rows, _BLOCK),)](
        slots,
        state.num_computed,
        state.tokens,
        state.floats,
        state.integers,
        inputs.token_ids,
        inputs.contexts,
        inputs.temperatures,
        inputs.seeds,
        state.tokens.stride(0),
        rows,
        FLOATS=state.floats.shape[1],
        INTEGERS=state.integers.shape[1],
        SEED=SEED_COLUMN,
        BLOCK=_BLOCK,
        **options(warps=4),
    )
    return inputs


def advance(slots: Tensor, contexts: Tensor, sampled: Tensor, state: DeviceSlots) -> None:
    """Enter sampled tokens i64[rows] behind the contexts i64[rows] of `slots`, which are computed up to there then.

    The slot that pads batches stays as it is.
    """
    _advance[(triton.cdiv(len(slots), _BLOCK),)](
        slots,
        contexts,
        sampled,
        state.num_computed,
        state.tokens,
        state.tokens.stride(0),
        len(slots),
        state.dummy_slot,
        BLOCK=_BLOCK,
        **options(warps=4),
    )
