"""Stored weights of experts as floats, for products of so many rows that reading every weight once is cheap beside
them.
"""

import torch
import triton
import triton.language as tl

from worker_svc.core.kernels.experts.weights import (
    FLOATS,
    FP4,
    FP4_GROUP,
    FP4_SPAN,
    ExpertWeights,
    operands,
    power_of_two,
    read_fp4,
    row_numbers,
)
from worker_svc.core.kernels.launch import has_dependent_launch, options, release, wait

_FP4 = tl.constexpr(FP4)
_FP4_GROUP, _FP4_SPAN = tl.constexpr(FP4_GROUP), tl.constexpr(FP4_SPAN)
_OUTPUTS, _INPUTS = 16, 512  # of a program
# Pairs of an expert, in the mean, from which on it is faster than products with stored weights.
_FEWEST_PAIRS = 384


def takes_floats(weight: ExpertWeights, num_pairs: int) -> bool:
    """Return whether products of so many pairs are computed with floats."""
    return weight.form != FLOATS and num_pairs >= _FEWEST_PAIRS * weight.count


@triton.jit
def _widen(
    numbers_ptr,
    exponents_ptr,
    scales_ptr,
    out_ptr,  # [outputs of all experts, K]
    num_outputs,
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
    rows = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    is_output = rows < num_outputs
    if FORM == _FP4:
        SPANS: tl.constexpr = row_numbers(K, FORM) // _FP4_GROUP
        span = tl.program_id(0) * (BLOCK_K // _FP4_SPAN) + tl.arange(0, BLOCK_K // _FP4_SPAN)
        place = tl.arange(0, _FP4_GROUP)
        is_there = is_output[:, None] & (span < SPANS)[None, :]
        cells = rows[:, None] * SPANS + span[None, :]
        numbers = numbers_ptr + cells[:, :, None] * _FP4_GROUP + place[None, None, :]
        low, high = read_fp4(tl.load(numbers, mask=is_there[:, :, None], other=0), dtype)
        scale = tl.load(scales_ptr + rows, mask=is_output, other=0.0)[:, None]
        low_power = power_of_two(tl.load(exponents_ptr + cells * 2, mask=is_there, other=0)) * scale
        high_power = power_of_two(tl.load(exponents_ptr + cells * 2 + 1, mask=is_there, other=0)) * scale
        inputs = span[:, None] * _FP4_SPAN + place[None, :]
        outs = out_ptr + rows[:, None, None] * K + inputs[None, :, :]
        is_low, is_high = (inputs < K)[None, :, :], (inputs + _FP4_GROUP < K)[None, :, :]
        is_row = is_output[:, None, None]
        tl.store(outs, (low.to(tl.float32) * low_power[:, :, None]).to(dtype), mask=is_row & is_low)
        tl.store(outs + _FP4_GROUP, (high.to(tl.float32) * high_power[:, :, None]).to(dtype), mask=is_row & is_high)
    else:
        inputs = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
        is_there = is_output[:, None] & (inputs < K)[None, :]
        numbers = tl.load(numbers_ptr + rows[:, None] * K + inputs[None, :], mask=is_there, other=0.0).to(tl.float32)
        if GROUP > 0:
            scales = scales_ptr + rows[:, None] * ((K + GROUP - 1) // GROUP) + (inputs // GROUP)[None, :]
            numbers *= tl.load(scales, mask=is_there, other=0.0)
        else:
            numbers *= tl.load(scales_ptr + rows, mask=is_output, other=0.0)[:, None]
        tl.store(out_ptr + rows[:, None] * K + inputs[None, :], numbers.to(dtype), mask=is_there)


def widen(weight: ExpertWeights, dtype: torch.dtype) -> ExpertWeights:
    """The floats that stored weights stand for, rounded to `dtype`."""
    count, outputs, inputs = weight.count, weight.outputs, weight.inputs
    out = torch.empty(count, outputs, inputs, dtype=dtype, device=weight.numbers.device)
    dependent = has_dependent_launch(out.device)
    _widen[(triton.cdiv(inputs, _INPUTS), triton.cdiv(count * outputs, _OUTPUTS))](
        *operands(weight, out, None)[:3],
        out,
        count * outputs,
        K=inputs,
        BLOCK_N=_OUTPUTS,
        BLOCK_K=_INPUTS,
        FORM=weight.form,
        GROUP=weight.group,
        DEPENDENT=dependent,
        **options(warps=4, dependent=dependent),
    )
    return ExpertWeights(FLOATS, out, inputs)
