"""Products of one row with a weight of 8-bit floats, at the speed at which the weight can be read.

A row is normed and rounded by whoever multiplies it, while the weight is on its way.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker_svc.core.kernels.launch import has_dependent_launch, options, release, wait
from worker_svc.core.kernels.linear.activation import gated
from worker_svc.core.kernels.linear.fp8_rounding import rounded, scale_of
from worker_svc.core.kernels.linear.ways import Fp8OneRowTile

_VECTOR = tl.constexpr(16)  # inputs that a thread loads at once


@triton.jit
def _products(w, x, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr):
    """Of a tile [OUTPUTS, INPUTS], added up within threads."""
    products = w.to(tl.float32) * x[None, :]
    return tl.sum(tl.reshape(products, (OUTPUTS, INPUTS // _VECTOR, _VECTOR)), 2)


@triton.jit
def _weights(weight_ptr, tile, k, N, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """A tile's weights from input k on; zeros where there are none."""
    rows = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = k + tl.arange(0, BLOCK_K)
    pointers = weight_ptr + rows[:, None].to(tl.int64) * K + columns[None, :]
    if K % BLOCK_K == 0:  # noqa: SIM108  (the compiler knows no choice of tensors)
        is_inside = (rows < N)[:, None]
    else:
        is_inside = (rows < N)[:, None] & (columns < K)[None, :]
    return tl.load(pointers, mask=is_inside, other=0.0)


@triton.jit
def _group_scales(
    scales_ptr, tile, k, N, stride, K: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Of each output and what a thread loads at once, [BLOCK_N, BLOCK_K / 16], from input k on; without groups ones."""
    if GROUP == 0:
        return tl.full((BLOCK_N, BLOCK_K // _VECTOR), 1.0, tl.float32)
    rows = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = k + tl.arange(0, BLOCK_K // _VECTOR) * _VECTOR
    pointers = scales_ptr + (columns // GROUP)[None, :] * stride + rows[:, None]
    return tl.load(pointers, mask=(rows < N)[:, None] & (columns < K)[None, :], other=0.0)


@triton.jit
def _output_scales(scales_ptr, rows, N, GROUP: tl.constexpr):
    """Of each output; ones where groups have them."""
    if GROUP > 0:
        return tl.full(rows.shape, 1.0, tl.float32)
    return tl.load(scales_ptr + rows, mask=rows < N, other=0.0)


@triton.jit
def _residual(residual_ptr, rows, N, RESIDUAL: tl.constexpr):
    if RESIDUAL:
        return tl.load(residual_ptr + rows, mask=rows < N, other=0.0).to(tl.float32)
    else:  # noqa: RET505  (the compiler would go on after the return)
        return 0.0


@triton.jit
def _of_row(pointer, columns, K: tl.constexpr):
    return tl.load(pointer + columns, mask=columns < K, other=0.0).to(tl.float32)


@triton.jit
def _as_multiplied(weighted, rms_inverse, inverse, x_ptr, NORM: tl.constexpr, ROUNDS: tl.constexpr):
    """The row as it is multiplied: normed, in its own precision, then rounded."""
    if NORM:
        weighted = (weighted * rms_inverse).to(x_ptr.dtype.element_ty).to(tl.float32)
    if ROUNDS:
        weighted = rounded(weighted, inverse).to(tl.float32)
    return weighted


@triton.jit
def _write(
    y,
    up,
    scale,
    scales,
    up_scales,
    tile,
    bias_ptr,
    residual,
    out_ptr,
    N,
    BLOCK_N: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
):
    rows = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = rows < N
    y = y * scale * scales
    if BIAS:
        y += tl.load(bias_ptr + rows, mask=is_row, other=0.0).to(tl.float32)
    if GATED:
        up = up * scale * up_scales
        if BIAS:
            up += tl.load(bias_ptr + N + rows, mask=is_row, other=0.0).to(tl.float32)
        y = gated(y, up, GELU)
    if RESIDUAL:
        y += residual
    tl.store(out_ptr + rows, y.to(out_ptr.dtype.element_ty), mask=is_row)


@triton.jit
def _fp8_row(
    x_ptr,  # [K]
    weight_ptr,  # f8[N, K]; GATED: [2 N, K], gates then ups
    scales_ptr,  # f32[N], with GROUP [groups, N]; GATED: 2 N, as biases
    norm_ptr,  # [K]
    bias_ptr,  # [N]
    residual_ptr,  # [N]
    out_ptr,  # [N]
    eps,
    N,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,  # inputs that share a scale; 0: all
    NORM: tl.constexpr,
    ROUNDS: tl.constexpr,  # the row to 8 bits
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    tile = tl.program_id(0)
    ups_ptr = weight_ptr + N.to(tl.int64) * K
    rows = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_K)
    # What no kernel before writes is asked for before they have ended.
    w = _weights(weight_ptr, tile, 0, N, K, BLOCK_N, BLOCK_K)
    u = w
    scales = _output_scales(scales_ptr, rows, N, GROUP)
    up_scales = scales
    if GATED:
        u = _weights(ups_ptr, tile, 0, N, K, BLOCK_N, BLOCK_K)
        up_scales = _output_scales(scales_ptr + N, rows, N, GROUP)
    stride = 2 * N if GATED else N
    UP_GROUP: tl.constexpr = GROUP if GATED else 0
    w_scales = _group_scales(scales_ptr, tile, 0, N, stride, K, GROUP, BLOCK_N, BLOCK_K)
    u_scales = _group_scales(scales_ptr + N, tile, 0, N, stride, K, UP_GROUP, BLOCK_N, BLOCK_K)
    norm = 1.0
    if NORM:
        norm = _of_row(norm_ptr, columns, K)
    wait(DEPENDENT)
    release(DEPENDENT)
    x = _of_row(x_ptr, columns, K)
    residual = _residual(residual_ptr, rows, N, RESIDUAL)  # asked for last it would be waited for
    squares = x * x
    x *= norm
    largest = tl.abs(x)
    for start in tl.static_range(BLOCK_K, K, BLOCK_K):
        more = _of_row(x_ptr, start + columns, K)
        squares += more * more
        if NORM:
            more *= _of_row(norm_ptr, start + columns, K)
        largest = tl.maximum(largest, tl.abs(more))
    rms_inverse, scale, inverse = 1.0, 1.0, 1.0
    if NORM:
        rms_inverse = 1.0 / tl.sqrt(tl.sum(squares, 0) / K + eps)
    if ROUNDS:
        # A norm keeps the order of magnitudes, and so does its rounding.
        scale, inverse = scale_of(_as_multiplied(tl.max(largest, 0), rms_inverse, 1.0, x_ptr, NORM, False))
    x = _as_multiplied(x, rms_inverse, inverse, x_ptr, NORM, ROUNDS)
    acc = tl.zeros((BLOCK_N, BLOCK_K // _VECTOR), tl.float32)
    up_acc = acc
    for k in tl.static_range(0, K, BLOCK_K):
        next_w, next_u = w, u
        next_w_scales, next_u_scales = w_scales, u_scales
        if k + BLOCK_K < K:
            next_w = _weights(weight_ptr, tile, k + BLOCK_K, N, K, BLOCK_N, BLOCK_K)
            if GATED:
                next_u = _weights(ups_ptr, tile, k + BLOCK_K, N, K, BLOCK_N, BLOCK_K)
            next_w_scales = _group_scales(scales_ptr, tile, k + BLOCK_K, N, stride, K, GROUP, BLOCK_N, BLOCK_K)
            next_u_scales = _group_scales(scales_ptr + N, tile, k + BLOCK_K, N, stride, K, UP_GROUP, BLOCK_N, BLOCK_K)
        if k > 0:
            x = _of_row(x_ptr, k + columns, K)
            if NORM:
                x *= _of_row(norm_ptr, k + columns, K)
            x = _as_multiplied(x, rms_inverse, inverse, x_ptr, NORM, ROUNDS)
        acc += _products(w, x, BLOCK_N, BLOCK_K) * w_scales
        if GATED:
            up_acc += _products(u, x, BLOCK_N, BLOCK_K) * u_scales
        w, u = next_w, next_u
        w_scales, u_scales = next_w_scales, next_u_scales
    y = tl.sum(acc, 1)
    up = tl.sum(up_acc, 1) if GATED else y
    _write(
        y, up, scale, scales, up_scales, tile,
        bias_ptr, residual, out_ptr, N, BLOCK_N, BIAS, RESIDUAL, GATED, GELU,
    )  # fmt: skip


def fp8_row_linear(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    tile: Fp8OneRowTile,
    *,
    rounds_inputs: bool,
    group: int | None = None,
    norm: tuple[Tensor, float] | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    is_gated: bool = False,
    gelu: bool = False,
) -> Tensor:
    """residual + f(norm(x) @ (weight * scales).T + bias) for one row.

    x [1, inputs], rounded to 8 bits after the norm if `rounds_inputs`; weight f8[outputs, inputs], scales
    f32[outputs, 1], or f32[groups, outputs] of `group` inputs each; norm: weight [inputs] and eps of an RMS norm, bias
    [outputs], residual [1, outputs] -> [1, outputs]. Gated: of the weight's rows the first half are gates, the second
    ups; f is silu(gate) * up, or with GELU by tanh, and the result has half as many columns.
    """
    inputs = x.shape[1]
    outputs = len(weight) // 2 if is_gated else len(weight)
    out = torch.empty(1, outputs, dtype=x.dtype, device=x.device)
    norm_weight, eps = norm if norm is not None else (x, 0.0)
    dependent = has_dependent_launch(x.device)
    _fp8_row[(triton.cdiv(outputs, tile.outputs),)](
        x,
        weight,
        scales,
        norm_weight,
        bias if bias is not None else x,
        residual if residual is not None else x,
        out,
        eps,
        outputs,
        K=inputs,
        BLOCK_N=tile.outputs,
        BLOCK_K=tile.inputs,
        GROUP=group or 0,
        NORM=norm is not None,
        ROUNDS=rounds_inputs,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        GATED=is_gated,
        GELU=gelu,
        DEPENDENT=dependent,
        **options(warps=tile.warps, dependent=dependent),
    )
    return out
