"""Root mean square norms, and the scales of their rows alone."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker_svc.core.kernels.launch import has_dependent_launch, options, release, wait
from worker_svc.core.kernels.linear.unscaled import Unscaled

_PART = tl.constexpr(2048)  # of a row that is read at once

_MANY_ROWS = 1024
_VALUES = 4096  # of a program where there are many rows


@triton.jit
def row_scale(x_ptr, eps, size):
    """1 / rms of the row of `size` at `x_ptr`; where there is none (0), 1."""
    part = tl.arange(0, _PART)
    squares = tl.zeros((_PART,), tl.float32)
    scale = 1.0
    if size > 0:
        for start in range(0, size, _PART):
            x = tl.load(x_ptr + start + part, mask=start + part < size, other=0.0).to(tl.float32)
            squares += x * x
        scale = 1.0 / tl.sqrt(tl.sum(squares, 0) / size + eps)
    return scale


@triton.jit
def whole_row_scale(x_ptr, eps, SIZE: tl.constexpr):
    """`row_scale` of a size that the compiler knows: all parts are read at once."""
    part = tl.arange(0, _PART)
    squares = tl.zeros((_PART,), tl.float32)
    scale = 1.0
    if SIZE > 0:
        for start in tl.static_range(0, SIZE, _PART):
            x = tl.load(x_ptr + start + part, mask=start + part < SIZE, other=0.0).to(tl.float32)
            squares += x * x
        scale = 1.0 / tl.sqrt(tl.sum(squares, 0) / SIZE + eps)
    return scale


@triton.jit
def _scale_rows(x_ptr, hidden_ptr, eps, size, hidden_size, DEPENDENT: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * _PART + tl.arange(0, _PART)
    pointers = x_ptr + row * size + columns
    wait(DEPENDENT)
    release(DEPENDENT)
    x = tl.load(pointers, mask=columns < size, other=0.0).to(tl.float32)
    x *= row_scale(hidden_ptr + row * hidden_size, eps, hidden_size)
    tl.store(pointers, x.to(x_ptr.dtype.element_ty), mask=columns < size)


def scale_rows(x: Tensor, unscaled: Unscaled) -> None:
    """Scale x [rows, size], contiguous, by the first of the hidden states, in place."""
    rows, size = x.shape
    hidden = unscaled.hidden
    dependent = has_dependent_launch(x.device)
    _scale_rows[(rows, triton.cdiv(size, _PART.value))](
        x,
        hidden,
        unscaled.eps,
        size,
        hidden.shape[1],
        DEPENDENT=dependent,
        **options(warps=4, dependent=dependent),
    )


# Neither is compiled again for a number of rows that divides by 16: steps that are no graphs have any.
@triton.jit(do_not_specialize=["num_rows"])
def _row_scales(
    x_ptr,
    out_ptr,
    eps,
    num_rows,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    is_inside = (rows < num_rows)[:, None] & (columns < SIZE)[None, :]
    wait(DEPENDENT)
    release(DEPENDENT)
    x = tl.load(x_ptr + rows[:, None] * SIZE + columns[None, :], mask=is_inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + rows, 1.0 / tl.sqrt(tl.sum(x * x, 1) / SIZE + eps), mask=rows < num_rows)


def row_scales(x: Tensor, eps: float) -> Tensor:
    """1 / rms of each row of x [rows, size], contiguous -> f32[rows]."""
    out = torch.empty(len(x), dtype=torch.float32, device=x.device)
    _launch(_row_scales, x, out, eps=eps)
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm(
    x_ptr,
    weight_ptr,
    residual_ptr,
    out_ptr,
    eps,
    num_rows,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
    ADD: tl.constexpr,  # to the residual
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    is_inside = (rows < num_rows)[:, None] & (columns < SIZE)[None, :]
    offsets = rows[:, None] * SIZE + columns[None, :]
    weight = tl.load(weight_ptr + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
    wait(DEPENDENT)
    release(DEPENDENT)
    x = tl.load(x_ptr + offsets, mask=is_inside, other=0.0).to(tl.float32)
    residual = 0.0
    if ADD:
        residual = tl.load(residual_ptr + offsets, mask=is_inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 1) / SIZE + eps)
    out = x * scale[:, None] * weight[None, :]
    if ADD:
        out += residual
    tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=is_inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [rows, size], contiguous -> like x; squares are summed in fp32."""
    out = torch.empty_like(x)
    _launch(_rms_norm, x, weight, x, out, eps=eps, ADD=False)
    return out


def norm_add(x: Tensor, weight: Tensor, eps: float, residual: Tensor) -> None:
    """Add the norm of x [rows, size] to `residual`, like x, in place; both are contiguous."""
    _launch(_rms_norm, x, weight, residual, residual, eps=eps, ADD=True)


def _launch(kernel: Any, x: Tensor, *others: Tensor, eps: float, **constants: bool) -> None:
    """A kernel whose programs do whole rows of x [rows, size], several where there are many."""
    num_rows, size = x.shape
    block = triton.next_power_of_2(size)
    rows = max(1, _VALUES // block) if num_rows >= _MANY_ROWS else 1
    dependent = has_dependent_launch(x.device)
    kernel[(triton.cdiv(num_rows, rows),)](
        x,
        *others,
        eps,
        num_rows,
        SIZE=size,
        ROWS=rows,
        BLOCK=block,
        DEPENDENT=dependent,
        **constants,
        **options(warps=4, dependent=dependent),
    )
