"""Stored weights of experts as floats, for products of so many rows that reading every weight once is cheap beside
them.
"""

import torch
import triton
import triton.language as tl

from worker_svc.core.kernels.experts.tuning import FEWEST_WIDENED_PAIRS
from worker_svc.core.kernels.experts.weights import (
    FLOATS,
    FP4,
    INT4,
    ExpertWeights,
    decode_fp4_exactly,
    operands,
    read_fp4,
    read_int4,
)
from worker_svc.core.kernels.launch import has_dependent_launch, options, release, wait
from worker_svc.core.kernels.linear.int4_numbers import decode_words
from worker_svc.core.kernels.words import BLOCK

_FP4, _INT4 = tl.constexpr(FP4), tl.constexpr(INT4)
_BLOCK = tl.constexpr(BLOCK)
_OUTPUTS, _INPUTS = 16, 512  # of a program


def takes_floats(weight: ExpertWeights, num_pairs: int) -> bool:
    """Return whether products of so many pairs are computed with floats."""
    fewest = FEWEST_WIDENED_PAIRS.get(weight.form)
    return fewest is not None and num_pairs >= fewest * weight.count


@triton.jit
def _widen(
    numbers_ptr,
    exponents_ptr,
    scales_ptr,
    out_ptr,  # [outputs of all experts, K]
    num_outputs,
    OUTPUTS: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait(DEPENDENT)
    release(DEPENDENT)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    # One axis: of the others a card has no more than 65,535.
    PARTS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    part = tl.program_id(0) % PARTS
    rows = (tl.program_id(0) // PARTS).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output = rows < num_outputs
    inputs = part * BLOCK_K + tl.arange(0, BLOCK_K)
    is_input = is_output[:, None] & (inputs < K)[None, :]
    if FORM == _FP4 or FORM == _INT4:  # noqa: PLR1714, SIM109  (the compiler knows no sets)
        COUNT: tl.constexpr = (K + _BLOCK - 1) // _BLOCK
        BLOCKS: tl.constexpr = BLOCK_K // _BLOCK
        block = part * BLOCKS + tl.arange(0, BLOCKS)
        ALL: tl.constexpr = (BLOCKS * BLOCK_N, 1)
        is_there = tl.reshape((block < COUNT)[:, None] & is_output[None, :], ALL)
        of_block = tl.reshape(tl.broadcast_to(rows[None, :], (BLOCKS, BLOCK_N)), ALL)
        blocks = tl.reshape(tl.broadcast_to(block[:, None], (BLOCKS, BLOCK_N)), ALL)
        expert = of_block // OUTPUTS
        if FORM == _FP4:
            words, exponents = read_fp4(numbers_ptr, exponents_ptr, of_block, expert, blocks, is_there, OUTPUTS, K)
            numbers = decode_fp4_exactly(words, exponents, dtype)
        else:
            words, packed, odd = read_int4(
                numbers_ptr, scales_ptr, of_block, expert, blocks, is_there, OUTPUTS, K, GROUP
            )
            numbers = decode_words(words, packed, odd, dtype, True)
        # block, output, t, v, s, h, e -> output, block, v, e, h, t, s
        numbers = tl.permute(tl.reshape(numbers, (BLOCKS, BLOCK_N, 4, 4, 2, 2, 2)), (1, 0, 3, 6, 5, 2, 4))
        numbers = tl.reshape(numbers, (BLOCK_N, BLOCK_K))
        if FORM == _FP4:
            numbers *= tl.load(scales_ptr + rows, mask=is_output, other=0.0)[:, None]
    else:
        numbers = tl.load(numbers_ptr + rows[:, None] * K + inputs[None, :], mask=is_input, other=0.0).to(tl.float32)
        if GROUP > 0:
            scales = scales_ptr + rows[:, None] * ((K + GROUP - 1) // GROUP) + (inputs // GROUP)[None, :]
            numbers *= tl.load(scales, mask=is_input, other=0.0)
        else:
            numbers *= tl.load(scales_ptr + rows, mask=is_output, other=0.0)[:, None]
    tl.store(out_ptr + rows[:, None] * K + inputs[None, :], numbers.to(dtype), mask=is_input)


def widen(weight: ExpertWeights, dtype: torch.dtype) -> ExpertWeights:
    """The floats that stored weights stand for, rounded to `dtype`; floats as they are."""
    if weight.form == FLOATS:
        return weight
    count, outputs, inputs = weight.count, weight.outputs, weight.inputs
    out = torch.empty(count, outputs, inputs, dtype=dtype, device=weight.numbers.device)
    dependent = has_dependent_launch(out.device)
    _widen[(triton.cdiv(inputs, _INPUTS) * triton.cdiv(count * outputs, _OUTPUTS),)](
        *operands(weight, out, None)[:3],
        out,
        count * outputs,
        OUTPUTS=outputs,
        K=inputs,
        BLOCK_N=_OUTPUTS,
        BLOCK_K=_INPUTS,
        FORM=weight.form,
        GROUP=weight.group,
        DEPENDENT=dependent,
        **options(warps=4, dependent=dependent),
    )
    return ExpertWeights(FLOATS, out, inputs)
