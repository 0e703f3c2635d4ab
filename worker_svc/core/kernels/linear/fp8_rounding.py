"""Rows rounded to 8-bit floats, each with a scale of its own, and the norm or the gate ahead of that."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker_svc.core.kernels.launch import has_dependent_launch, options, release, wait
from worker_svc.core.kernels.linear.activation import gated

LARGEST = torch.finfo(torch.float8_e4m3fn).max
_LARGEST = tl.constexpr(LARGEST)
_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
_MOST_AT_ONCE = 16384  # values of a row that a program holds
# That a warp writes: of gates it reads twice as many, and more of them. 256 rows of 12,288 gates took an H200 4.8 us
# with 2,048, and 5.7 with 1,024.
_WARP_VALUES, _WARP_GATES = 1024, 2048


@triton.jit
def scale_of(largest):
    """The scale of a row whose largest magnitude this is, and 1 / scale: what torch computes, bit for bit."""
    scale = tl.maximum(tl.div_rn(largest, _LARGEST), _TINY)
    return scale, tl.div_rn(1.0, scale)


@triton.jit
def rounded(x, inverse):
    """x / scale as 8-bit floats, of which none is larger than the largest but by rounding."""
    return (x * inverse).to(tl.float8e4nv)


@triton.jit
def _values(x_ptr, norm_ptr, columns, size, NORM: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr):
    """Those of a row at `columns`, gated, or normed but for 1 / rms, and what they are before their norm."""
    is_column = columns < size
    x = tl.load(x_ptr + columns, mask=is_column, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(x_ptr + size + columns, mask=is_column, other=0.0).to(tl.float32)
        x = gated(x, up, GELU).to(x_ptr.dtype.element_ty).to(tl.float32)
    before = x
    if NORM:
        x *= tl.load(norm_ptr + columns, mask=is_column, other=0.0).to(tl.float32)
    return x, before


@triton.jit
def _scaled(x, rms_inverse, like_ptr, NORM: tl.constexpr):
    if NORM:
        x = (x * rms_inverse).to(like_ptr.dtype.element_ty).to(tl.float32)
    return x


@triton.jit
def _round_rows(
    x_ptr,  # [rows, SIZE]; GATED: [rows, 2 SIZE], gates then ups
    norm_ptr,  # [SIZE]
    out_ptr,  # f8[rows, SIZE]
    scales_ptr,  # f32[rows]
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * (2 * SIZE if GATED else SIZE)
    columns = tl.arange(0, BLOCK)
    wait(DEPENDENT)
    release(DEPENDENT)
    x, before = _values(x_ptr, norm_ptr, columns, SIZE, NORM, GATED, GELU)
    largest, squares = tl.max(tl.abs(x), 0), tl.sum(before * before, 0)
    for start in tl.static_range(BLOCK, SIZE, BLOCK):
        more, before = _values(x_ptr, norm_ptr, start + columns, SIZE, NORM, GATED, GELU)
        largest = tl.maximum(largest, tl.max(tl.abs(more), 0))
        squares += tl.sum(before * before, 0)
    rms_inverse = 1.0
    if NORM:
        rms_inverse = 1.0 / tl.sqrt(squares / SIZE + eps)
    scale, inverse = scale_of(_scaled(largest, rms_inverse, x_ptr, NORM))
    tl.store(scales_ptr + row, scale)
    out = out_ptr + row * SIZE
    tl.store(out + columns, rounded(_scaled(x, rms_inverse, x_ptr, NORM), inverse), mask=columns < SIZE)
    for start in tl.static_range(BLOCK, SIZE, BLOCK):
        more, before = _values(x_ptr, norm_ptr, start + columns, SIZE, NORM, GATED, GELU)
        values = rounded(_scaled(more, rms_inverse, x_ptr, NORM), inverse)
        tl.store(out + start + columns, values, mask=start + columns < SIZE)


def round_rows(x: Tensor, norm: tuple[Tensor, float] | None = None) -> tuple[Tensor, Tensor]:
    """x [rows, size], contiguous, after an RMS norm of this weight [size] and eps -> the same in 8-bit floats, and what
    to multiply each row with, f32[rows, 1]: the row's largest magnitude becomes the largest of 8 bits.
    """
    return _round(x, x.shape[1], norm=norm)


def round_gated(gate_up: Tensor, *, gelu: bool) -> tuple[Tensor, Tensor]:
    """silu(gate) * up, or what `gelu` says, in the precision of gate_up [rows, 2 * size], gates then ups, contiguous,
    and then as `round_rows`.
    """
    return _round(gate_up, gate_up.shape[1] // 2, is_gated=True, gelu=gelu)


def _round(
    x: Tensor, size: int, *, norm: tuple[Tensor, float] | None = None, is_gated: bool = False, gelu: bool = False
) -> tuple[Tensor, Tensor]:
    rows = len(x)
    out = torch.empty(rows, size, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, 1, device=x.device)
    weight, eps = norm if norm is not None else (x, 0.0)
    block = min(_MOST_AT_ONCE, triton.next_power_of_2(size))
    dependent = has_dependent_launch(x.device)
    _round_rows[(rows,)](
        x,
        weight,
        out,
        scales,
        eps,
        SIZE=size,
        BLOCK=block,
        NORM=norm is not None,
        GATED=is_gated,
        GELU=gelu,
        DEPENDENT=dependent,
        **options(warps=max(4, min(16, block // (_WARP_GATES if is_gated else _WARP_VALUES))), dependent=dependent),
    )
    return out, scales
