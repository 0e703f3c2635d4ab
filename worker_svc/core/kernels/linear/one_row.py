"""Products of one row with a weight, at the speed at which the weight can be read."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker_svc.core.kernels.launch import has_dependent_launch, options, power_of_two_divisor, release, wait
from worker_svc.core.kernels.linear.activation import gated
from worker_svc.core.kernels.linear.ways import OneRowTile

VECTOR = 8  # columns that a thread loads at once
_VECTOR = tl.constexpr(VECTOR)


@triton.jit
def products(w, x, ROWS: tl.constexpr, COLUMNS: tl.constexpr, IN_THREAD: tl.constexpr):
    """Of a tile [ROWS, COLUMNS]; added up within threads, they take a quarter of the registers of the tile's weights
    instead of twice as many.
    """
    found = w.to(tl.float32) * x[None, :]
    if IN_THREAD:
        found = tl.sum(tl.reshape(found, (ROWS, COLUMNS // _VECTOR, _VECTOR)), 2)
    return found


@triton.jit
def _squares(x, COLUMNS: tl.constexpr, IN_THREAD: tl.constexpr):
    """Of columns [COLUMNS], added up as in `products`."""
    squares = x * x
    if IN_THREAD:
        squares = tl.sum(tl.reshape(squares, (COLUMNS // _VECTOR, _VECTOR)), 1)
    return squares


@triton.jit
def _load(pointers, columns, K: tl.constexpr, EVEN: tl.constexpr):
    """The numbers at pointers to columns, of which there are K, and zeros after these; EVEN: there are none after."""
    if EVEN:
        return tl.load(pointers)
    else:  # noqa: RET505  (the compiler would go on after the return)
        return tl.load(pointers, mask=columns < K, other=0.0)


@triton.jit
def _normed(x, scale, norm, SCALED: tl.constexpr, WEIGHTED: tl.constexpr):
    if SCALED:
        x = x * scale
    if WEIGHTED:
        x = x * norm
    return x


@triton.jit
def _step(
    acc,
    up_acc,
    squares,
    x_ptr,
    norm_ptr,
    weights,
    ups,
    columns,
    scale,
    K: tl.constexpr,
    EVEN: tl.constexpr,
    SCALED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    IN_THREAD: tl.constexpr,
    GATED: tl.constexpr,
):
    """The sums after these columns [BLOCK_K]: of products with weights [BLOCK_N, BLOCK_K], with ups, and of squares."""
    ROWS: tl.constexpr = weights.shape[0]
    COLUMNS: tl.constexpr = columns.shape[0]
    w = _load(weights, columns[None, :], K, EVEN)
    if GATED:
        u = _load(ups, columns[None, :], K, EVEN)
    x = _load(x_ptr + columns, columns, K, EVEN).to(tl.float32)
    squares += _squares(x, COLUMNS, IN_THREAD)
    norm = x
    if WEIGHTED:
        norm = _load(norm_ptr + columns, columns, K, EVEN).to(tl.float32)
    x = _normed(x, scale, norm, SCALED, WEIGHTED)
    acc += products(w, x, ROWS, COLUMNS, IN_THREAD)
    if GATED:
        up_acc += products(u, x, ROWS, COLUMNS, IN_THREAD)
    return acc, up_acc, squares


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
    WEIGHTED: tl.constexpr,  # its weights are read
    LATE: tl.constexpr,  # its scale is multiplied last
    IN_THREAD: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,  # the gate's, else silu
    DEPENDENT: tl.constexpr,
):
    END: tl.constexpr = K // BLOCK_K * BLOCK_K  # of steps that are full
    EVEN: tl.constexpr = END > 0
    SCALED: tl.constexpr = NORM and not LATE
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_K)
    weights = weight_ptr + rows[:, None].to(tl.int64) * K + columns[None, :]
    ups = weights + N.to(tl.int64) * K
    # What no kernel before writes is asked for before they have ended.
    w = _load(weights, columns[None, :], K, EVEN)
    if GATED:
        u = _load(ups, columns[None, :], K, EVEN)
    norm = columns.to(tl.float32)
    if WEIGHTED:
        norm = _load(norm_ptr + columns, columns, K, EVEN).to(tl.float32)
    if BIAS:
        bias = tl.load(bias_ptr + rows).to(tl.float32)
    wait(DEPENDENT)
    release(DEPENDENT)
    if RESIDUAL:
        # Asked for last it would be waited for.
        residual = tl.load(residual_ptr + rows).to(tl.float32)
    scale, late_scale = 1.0, 1.0
    if SCALED:
        whole = tl.arange(0, WHOLE)
        hidden = tl.load(x_ptr + whole, mask=whole < K, other=0.0).to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(hidden * hidden) / K + eps)
    x = _load(x_ptr + columns, columns, K, EVEN).to(tl.float32)
    squares = _squares(x, BLOCK_K, IN_THREAD)  # the compiler leaves them out where nobody asks
    x = _normed(x, scale, norm, SCALED, WEIGHTED)
    acc = products(w, x, BLOCK_N, BLOCK_K, IN_THREAD)
    up_acc = 0.0
    if GATED:
        up_acc = products(u, x, BLOCK_N, BLOCK_K, IN_THREAD)
    for k in range(BLOCK_K, END, BLOCK_K):
        acc, up_acc, squares = _step(
            *(acc, up_acc, squares, x_ptr, norm_ptr, weights + k, ups + k, k + columns, scale),
            *(K, True, SCALED, WEIGHTED, IN_THREAD, GATED),
        )
    if EVEN and K > END:
        # What full steps leave. Products with masks in all steps took up to a fifth longer on an H200.
        acc, up_acc, squares = _step(
            *(acc, up_acc, squares, x_ptr, norm_ptr, weights + END, ups + END, END + columns, scale),
            *(K, False, SCALED, WEIGHTED, IN_THREAD, GATED),
        )
    if NORM and LATE:
        # Its sum across threads comes with the products', and no weight waits for it.
        late_scale = 1.0 / tl.sqrt(tl.sum(squares) / K + eps)
    y = tl.sum(acc, 1) * late_scale
    if GATED:
        y = gated(y, tl.sum(up_acc, 1) * late_scale, GELU)
    if BIAS:
        y += bias
    if RESIDUAL:
        y += residual
    tl.store(out_ptr + rows, y.to(out_ptr.dtype.element_ty))


def row_linear(
    x: Tensor,
    weight: Tensor,
    tile: OneRowTile,
    *,
    norm: tuple[Tensor, float] | None = None,
    is_folded: bool = False,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    is_gated: bool = False,
    is_gelu: bool = False,
) -> Tensor:
    """residual + f(norm(x) @ weight.T) + bias for one row.

    x [1, inputs], weight [outputs, inputs], norm: weight [inputs], all ones if it is folded, and eps of an RMS norm,
    bias [outputs], residual [1, outputs] -> [1, outputs]. Gated: of the weight's rows the first half are gates, the
    second ups; f is silu(gate) * up, or gelu(gate) * up, and the result has half as many columns.
    """
    inputs = x.shape[1]
    outputs = len(weight) // 2 if is_gated else len(weight)
    out = torch.empty(1, outputs, dtype=x.dtype, device=x.device)
    rows, columns = power_of_two_divisor(outputs, tile.outputs), tile.step(inputs)
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
        # Ones are left out only where that was measured.
        WEIGHTED=norm is not None and not (is_folded and tile.late),
        LATE=tile.late,
        IN_THREAD=tile.in_thread,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        GATED=is_gated,
        GELU=is_gelu,
        DEPENDENT=dependent,
        **options(warps=tile.warps, dependent=dependent),
    )
    return out
