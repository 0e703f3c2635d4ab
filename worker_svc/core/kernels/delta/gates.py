"""Gates of what the delta rule reads, and of what attention does."""

import triton
import triton.language as tl
from torch import Tensor

from worker_svc.core.kernels.launch import has_dependent_launch, options, release, wait

_BLOCK = 1024  # numbers of a row that a program multiplies


@triton.jit
def _sigmoid_gated(x_ptr, gate_ptr, x_stride, gate_stride, size, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = places < size
    wait(DEPENDENT)
    release(DEPENDENT)
    gate = tl.load(gate_ptr + row * gate_stride + places, mask=is_there, other=0.0).to(tl.float32)
    values = x_ptr + row * x_stride + places
    x = tl.load(values, mask=is_there, other=0.0).to(tl.float32)
    tl.store(values, (x * tl.sigmoid(gate)).to(x_ptr.dtype.element_ty), mask=is_there)


def sigmoid_gated(x: Tensor, gate: Tensor) -> None:
    """Multiply x [rows, size] by sigmoid(gate [rows, size]), in place."""
    if not len(x):
        return
    dependent = has_dependent_launch(x.device)
    _sigmoid_gated[(len(x), triton.cdiv(x.shape[1], _BLOCK))](
        x,
        gate,
        x.stride(0),
        gate.stride(0),
        x.shape[1],
        BLOCK=_BLOCK,
        DEPENDENT=dependent,
        **options(warps=4, dependent=dependent),
    )


@triton.jit
def _norm_silu(
    x_ptr,  # [rows, heads * SIZE]
    weight_ptr,  # [SIZE]
    gate_ptr,  # as x
    x_stride,
    gate_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,  # power of two from SIZE
    DEPENDENT: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    places = tl.arange(0, BLOCK)
    is_there = places < SIZE
    weight = tl.load(weight_ptr + places, mask=is_there, other=0.0).to(tl.float32)
    wait(DEPENDENT)
    release(DEPENDENT)
    values = x_ptr + row * x_stride + head * SIZE + places
    x = tl.load(values, mask=is_there, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + head * SIZE + places, mask=is_there, other=0.0).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps) * weight * (gate * tl.sigmoid(gate))
    tl.store(values, x.to(x_ptr.dtype.element_ty), mask=is_there)


def norm_silu(x: Tensor, weight: Tensor, eps: float, gate: Tensor) -> None:
    """Make of x [rows, heads * size], in place, norm(x) * silu(gate), normalised by `weight` [size] head by head."""
    if not len(x):
        return
    size, dependent = len(weight), has_dependent_launch(x.device)
    _norm_silu[(len(x), x.shape[1] // size)](
        x,
        weight,
        gate,
        x.stride(0),
        gate.stride(0),
        eps,
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        DEPENDENT=dependent,
        **options(warps=1, dependent=dependent),
    )
