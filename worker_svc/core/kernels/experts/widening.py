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
    FP4_GROUP,
    ExpertWeights,
    operands,
    power_of_two,
    read_fp4,
)
from worker_svc.core.kernels.launch import has_dependent_launch, options, release, wait

_FP4 = tl.constexpr(FP4)
_FP4_GROUP = tl.constexpr(FP4_GROUP)
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
    inputs = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    is_input = is_output[:, None] & (inputs < K)[None, :]
    if FORM == _FP4:
        byte = tl.program_id(0) * (BLOCK_K // 2) + tl.arange(0, BLOCK_K // 2)
        group = tl.program_id(0) * (BLOCK_K // _FP4_GROUP) + tl.arange(0, BLOCK_K // _FP4_GROUP)
        is_there = is_output[:, None] & (byte < K // 2)[None, :]
        low, high = read_fp4(
            tl.load(numbers_ptr + rows[:, None] * (K // 2) + byte[None, :], mask=is_there, other=0), dtype
        )
        is_group = is_output[:, None] & (group < K // _FP4_GROUP)[None, :]
        exponents = exponents_ptr + rows[:, None] * (K // _FP4_GROUP) + group[None, :]
        power = power_of_two(tl.load(exponents, mask=is_group, other=0))
        power *= tl.load(scales_ptr + rows, mask=is_output, other=0.0)[:, None]
        numbers = tl.join(low, high).to(tl.float32).reshape(BLOCK_N, BLOCK_K // _FP4_GROUP, _FP4_GROUP)
        numbers = (numbers * power[:, :, None]).reshape(BLOCK_N, BLOCK_K)
    else:
        numbers = tl.load(numbers_ptr + rows[:, None] * K + inputs[None, :], mask=is_input, other=0.0).to(tl.float32)
        if GROUP > 0:
            scales = scales_ptr + rows[:, None] * ((K + GROUP - 1) // GROUP) + (inputs // GROUP)[None, :]
            numbers *= tl.load(scales, mask=is_input, other=0.0)
        else:
            numbers *= tl.load(scales_ptr + rows, mask=is_output, other=0.0)[:, None]
    tl.store(out_ptr + rows[:, None] * K + inputs[None, :], numbers.to(dtype), mask=is_input)


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
