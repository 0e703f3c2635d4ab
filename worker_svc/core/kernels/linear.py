"""Products of one row with a weight, at the speed at which the weight can be read."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker_svc.core.kernels.launch import has_dependent_launch, options, power_of_two_divisor, release, wait

_MIN_COLUMNS = 64  # of a tile


@triton.jit
def _row_linear(
    x_ptr,  # [K]
    weight_ptr,  # [N, K]; GATED: [2 N, K], gates then ups
    norm_ptr,  # [K]
    bias_ptr,  # [N]
    residual_ptr,  # [N]
    out_ptr,  # [N]
    eps,
    N,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WHOLE: tl.constexpr,  # power of two from K
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_K)
    weights = weight_ptr + rows[:, None].to(tl.int64) * K + columns[None, :]
    # What no kernel before writes is asked for before they have ended.
    w = tl.load(weights)
    if GATED:
        ups = weights + N.to(tl.int64) * K
        u = tl.load(ups)
    if NORM:
        norm = tl.load(norm_ptr + columns).to(tl.float32)
    wait(DEPENDENT)
    release(DEPENDENT)
    if NORM:
        whole = tl.arange(0, WHOLE)
        hidden = tl.load(x_ptr + whole, mask=whole < K, other=0.0).to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(hidden * hidden) / K + eps)
    x = tl.load(x_ptr + columns).to(tl.float32)
    if NORM:
        x = x * scale * norm
    acc = w.to(tl.float32) * x[None, :]
    if GATED:
        up_acc = u.to(tl.float32) * x[None, :]
    for k in range(BLOCK_K, K, BLOCK_K):
        w = tl.load(weights + k)
        if GATED:
            u = tl.load(ups + k)
        x = tl.load(x_ptr + k + columns).to(tl.float32)
        if NORM:
            x = x * scale * tl.load(norm_ptr + k + columns).to(tl.float32)
        acc += w.to(tl.float32) * x[None, :]
        if GATED:
            up_acc += u.to(tl.float32) * x[None, :]
    y = tl.sum(acc, 1)
    if GATED:
        y = y * tl.sigmoid(y) * tl.sum(up_acc, 1)
    if BIAS:
        y += tl.load(bias_ptr + rows).to(tl.float32)
    if RESIDUAL:
        y += tl.load(residual_ptr + rows).to(tl.float32)
    tl.store(out_ptr + rows, y.to(out_ptr.dtype.element_ty))


def _tile(outputs: int, inputs: int, *, is_gated: bool) -> tuple[int, int, int]:
    """Rows and columns of a tile and warps, as measured best on an H200 for Qwen3-0.6B's and 8B's shapes: wide rows
    where the weight is small, so that few programs end together, narrow ones where it is long.
    """
    if inputs <= 1024:
        rows, columns, warps = (8, 512, 4) if is_gated or outputs > 65536 else (32, 1024, 8)
    elif inputs <= 3072:
        rows, columns, warps = (8, 2048, 8) if inputs <= 2048 else (4, 1024, 8)
    elif inputs > 8192:
        rows, columns, warps = 1, 2048, 8
    elif is_gated:
        rows, columns, warps = 1, 4096, 4
    elif outputs > inputs:
        rows, columns, warps = (8, 1024, 4) if outputs > 65536 else (4, 2048, 8)
    else:
        rows, columns, warps = 8, 1024, 4
    return power_of_two_divisor(outputs, rows), power_of_two_divisor(inputs, columns), warps


def fits_row_linear(weight: Tensor) -> bool:
    """Whether `row_linear` can do it: inputs divide into tiles."""
    return power_of_two_divisor(weight.shape[1], _MIN_COLUMNS) == _MIN_COLUMNS


def row_linear(
    x: Tensor,
    weight: Tensor,
    *,
    norm: tuple[Tensor, float] | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    is_gated: bool = False,
) -> Tensor:
    """residual + f(norm(x) @ weight.T) + bias for one row.

    x [1, inputs], weight [outputs, inputs], norm: weight [inputs] and eps of an RMS norm, bias [outputs], residual
    [1, outputs] -> [1, outputs]. Gated: of the weight's rows the first half are gates, the second ups; f is
    silu(gate) * up, and the result has half as many columns.
    """
    inputs = x.shape[1]
    outputs = len(weight) // 2 if is_gated else len(weight)
    out = torch.empty(1, outputs, dtype=x.dtype, device=x.device)
    rows, columns, warps = _tile(outputs, inputs, is_gated=is_gated)
    norm_weight, eps = norm if norm is not None else (x, 0.0)
    dependent = has_dependent_launch(x.device)
    _row_linear[(outputs // rows,)](
        x,
        weight,
        norm_weight,
        bias if bias is not None else x,
        residual if residual is not None else x,
        out,
        eps,
        outputs,
        K=inputs,
        BLOCK_N=rows,
        BLOCK_K=columns,
        WHOLE=triton.next_power_of_2(inputs),
        NORM=norm is not None,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        GATED=is_gated,
        DEPENDENT=dependent,
        **options(warps=warps, dependent=dependent),
    )
    return out
