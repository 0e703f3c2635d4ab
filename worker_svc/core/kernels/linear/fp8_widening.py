"""Weights of 8-bit floats with scales for groups of inputs as half floats, for products of many rows."""

from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker_svc.core.kernels.launch import has_dependent_launch, options, power_of_two_divisor, release, wait

_OUTPUTS, _INPUTS, _WARPS = 64, 128, 4
_LEAST_INPUTS = 16


class Fp8GroupedWeight(Protocol):
    """A weight of 8-bit floats with a scale for each group of an output's inputs."""

    weight: Tensor  # f8[outputs, inputs]
    scales: Tensor  # f32[groups, outputs]
    group: int


@triton.jit
def _widen(
    weight_ptr,  # f8[N, K]
    scales_ptr,  # f32[groups, N]
    out_ptr,  # [N, K]
    N,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,  # of one group
    DEPENDENT: tl.constexpr,
):
    rows = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    first = tl.program_id(1) * INPUTS
    columns = first + tl.arange(0, INPUTS)
    is_inside = (rows < N)[:, None] & (columns < K)[None, :]
    places = rows[:, None].to(tl.int64) * K + columns[None, :]
    wait(DEPENDENT)
    release(DEPENDENT)
    scales = tl.load(scales_ptr + first // GROUP * N + rows, mask=rows < N, other=0.0)
    numbers = tl.load(weight_ptr + places, mask=is_inside, other=0.0).to(tl.float32) * scales[:, None]
    tl.store(out_ptr + places, numbers.to(out_ptr.dtype.element_ty), mask=is_inside)


def can_widen(weight: Fp8GroupedWeight) -> bool:
    """Return whether `widen` has such groups."""
    return weight.group % _LEAST_INPUTS == 0


def widen(weight: Fp8GroupedWeight, dtype: torch.dtype) -> Tensor:
    """The weight, rounded once, [outputs, inputs]: as `Fp8Groups.widen` has it, bit for bit."""
    outputs, inputs = weight.weight.shape
    out = torch.empty(outputs, inputs, dtype=dtype, device=weight.weight.device)
    block = power_of_two_divisor(weight.group, _INPUTS)
    dependent = has_dependent_launch(out.device)
    _widen[(triton.cdiv(outputs, _OUTPUTS), triton.cdiv(inputs, block))](
        weight.weight,
        weight.scales,
        out,
        outputs,
        K=inputs,
        GROUP=weight.group,
        OUTPUTS=_OUTPUTS,
        INPUTS=block,
        DEPENDENT=dependent,
        **options(warps=_WARPS, dependent=dependent),
    )
    return out
