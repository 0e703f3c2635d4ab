"""Weights of 4 bits as half floats, for products of so many rows that to widen the weight is little beside them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker_svc.core.kernels.launch import has_dependent_launch, options, power_of_two_divisor, release, wait
from worker_svc.core.kernels.linear.int4_numbers import Int4Weight, decode, in_order
from worker_svc.core.kernels.linear.int4_rows import groups_of

_BLOCK, _WORDS = tl.constexpr(128), tl.constexpr(16)
_OUTPUTS, _WARPS = 64, 4


@triton.jit
def _widen(
    numbers_ptr,  # i32[outputs, K / 128, 16]
    scales_ptr,  # i32[groups, N]
    out_ptr,  # [outputs, K]
    first,  # of the outputs, of N
    N,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCKS: tl.constexpr,  # of a program
    WARPS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    words = (first + n)[:, None].to(tl.int64) * (K // 8) + tl.arange(0, _WORDS)[None, :]
    outs = out_ptr + in_order(n, OUTPUTS, WARPS)[:, None].to(tl.int64) * K + tl.arange(0, _BLOCK)[None, :]
    wait(DEPENDENT)
    release(DEPENDENT)
    for each in tl.static_range(BLOCKS):
        block = tl.program_id(1) * BLOCKS + each
        packed = groups_of(scales_ptr, first + n, N, block, False, GROUP, OUTPUTS)
        packed_odd = packed
        if GROUP < 32:
            packed_odd = groups_of(scales_ptr, first + n, N, block, True, GROUP, OUTPUTS)
        numbers = decode(tl.load(numbers_ptr + words + block * _WORDS), packed, packed_odd, dtype, OUTPUTS, WARPS, True)
        tl.store(outs + block * _BLOCK, numbers)


def widen(weight: Int4Weight, dtype: torch.dtype, first: int, last: int) -> Tensor:
    """These outputs of a weight, whose inputs are whole blocks: [last - first, inputs]."""
    out = torch.empty(last - first, weight.inputs, dtype=dtype, device=weight.numbers.device)
    outputs, blocks = power_of_two_divisor(last - first, _OUTPUTS), weight.numbers.shape[1]
    each = power_of_two_divisor(blocks, 2)
    dependent = has_dependent_launch(out.device)
    _widen[((last - first) // outputs, blocks // each)](
        weight.numbers,
        weight.scales.view(torch.int32),
        out,
        first,
        weight.outputs,
        K=weight.inputs,
        GROUP=weight.group or weight.inputs,
        OUTPUTS=outputs,
        BLOCKS=each,
        WARPS=_WARPS,
        DEPENDENT=dependent,
        **options(warps=_WARPS, dependent=dependent),
    )
    return out
