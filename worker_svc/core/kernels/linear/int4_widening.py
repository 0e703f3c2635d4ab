"""Weights of 4 bits as half floats, for products of so many rows that to widen the weight is little beside them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker_svc.core.kernels.launch import has_dependent_launch, options, power_of_two_divisor, release, wait
from worker_svc.core.kernels.linear.int4_numbers import Int4Weight, decode
from worker_svc.core.kernels.linear.int4_rows import groups_of
from worker_svc.core.kernels.words import BLOCK, WORDS, in_order

_BLOCK, _WORDS = tl.constexpr(BLOCK), tl.constexpr(WORDS)
_OUTPUTS, _WARPS = 64, 4
_SMALL_GROUPS = (16, 32, 64)


@triton.jit
def _widen(
    numbers_ptr,  # i32[N, K / 128, 16]
    scales_ptr,  # i32[groups, N]
    out_ptr,  # [N, K]
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
    words = n[:, None].to(tl.int64) * (K // 8) + tl.arange(0, _WORDS)[None, :]
    outs = out_ptr + in_order(n, OUTPUTS, WARPS)[:, None].to(tl.int64) * K + tl.arange(0, _BLOCK)[None, :]
    wait(DEPENDENT)
    release(DEPENDENT)
    for each in tl.static_range(BLOCKS):
        block = tl.program_id(1) * BLOCKS + each
        packed = groups_of(scales_ptr, n, N, block, False, GROUP, OUTPUTS)
        packed_odd = packed
        if GROUP < 32:
            packed_odd = groups_of(scales_ptr, n, N, block, True, GROUP, OUTPUTS)
        numbers = decode(tl.load(numbers_ptr + words + block * _WORDS), packed, packed_odd, dtype, OUTPUTS, WARPS, True)
        tl.store(outs + block * _BLOCK, numbers)


def can_widen(weight: Int4Weight, dtype: torch.dtype) -> bool:
    """Return whether `widen` has these sizes."""
    group = weight.group
    has_groups = group is None or group % BLOCK == 0 or group in _SMALL_GROUPS
    is_half = dtype in (torch.bfloat16, torch.float16)
    return is_half and has_groups and weight.outputs % _OUTPUTS == 0 and weight.inputs % BLOCK == 0


def widen(weight: Int4Weight, dtype: torch.dtype) -> Tensor:
    """The weight, rounded once, [outputs, inputs]: as `Int4.widen` has it, bit for bit."""
    out = torch.empty(weight.outputs, weight.inputs, dtype=dtype, device=weight.numbers.device)
    blocks = weight.numbers.shape[1]
    each = power_of_two_divisor(blocks, 2)
    dependent = has_dependent_launch(out.device)
    _widen[(weight.outputs // _OUTPUTS, blocks // each)](
        weight.numbers,
        weight.scales.view(torch.int32),
        out,
        weight.outputs,
        K=weight.inputs,
        GROUP=weight.group or weight.inputs,
        OUTPUTS=_OUTPUTS,
        BLOCKS=each,
        WARPS=_WARPS,
        DEPENDENT=dependent,
        **options(warps=_WARPS, dependent=dependent),
    )
    return out
