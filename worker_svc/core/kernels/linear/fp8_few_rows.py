"""Products of a few rows with a weight of 8-bit floats, cut along the inputs so that small weights too keep the device
reading.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker_svc.core.kernels.ahead import ask
from worker_svc.core.kernels.launch import has_dependent_launch, options, release, wait
from worker_svc.core.kernels.linear.activation import gated
from worker_svc.core.kernels.linear.ways import (
    MOST_FEW_TILES,
    MOST_FP8_FEW_ROWS,
    MOST_FP8_TILE_ROWS,
    Fp8FewRowsTile,
    fp8_tile_rows,
)

_MOST_ROW_TILES = triton.cdiv(MOST_FP8_FEW_ROWS, MOST_FP8_TILE_ROWS)


@triton.jit
def _multiplied(w, x, acc, INPUTS: tl.constexpr):
    """acc + w @ x: of 8-bit rows the sum of each step is added in fp32, since matrix units keep 14 bits of theirs."""
    if x.dtype == tl.float8e4nv:
        return tl.dot(w, x, acc, max_num_imprecise_acc=INPUTS)
    return tl.dot(w.to(x.dtype), x, acc)


@triton.jit
def _added(acc, w, x, scales, INPUTS: tl.constexpr, GROUP: tl.constexpr):
    """acc + (w @ x) * scales: those of the inputs' group; without groups scales are multiplied last."""
    if GROUP == 0:
        return _multiplied(w, x, acc, INPUTS)
    return acc + tl.dot(w.to(x.dtype), x) * scales[:, None]


@triton.jit
def _group_scales(scales_ptr, k, outputs, stride, GROUP: tl.constexpr):
    """Those of input k's group; without groups ones, which nobody reads."""
    if GROUP == 0:
        return tl.full(outputs.shape, 1.0, tl.float32)
    return tl.load(scales_ptr + k // GROUP * stride + outputs)


@triton.jit
def _total(parts_ptr, offsets, is_row, PART, SPLITS: tl.constexpr):
    """The sum of all splits' parts, always in the same order."""
    total = tl.load(parts_ptr + offsets, mask=is_row, other=0.0, cache_modifier=".cg")
    for part in range(1, SPLITS):
        total += tl.load(parts_ptr + part * PART + offsets, mask=is_row, other=0.0, cache_modifier=".cg")
    return total


@triton.jit
def _ended(
    acc,
    row_scales_ptr,
    scales_ptr,
    bias_ptr,
    rows,
    outputs,
    is_row,
    GROUP: tl.constexpr,
    ROUNDS: tl.constexpr,
    BIAS: tl.constexpr,
):
    """The sum with its scales, where they were not multiplied before, and its bias."""
    if ROUNDS:
        acc *= tl.load(row_scales_ptr + rows[None, :], mask=is_row, other=0.0)
    if GROUP == 0:
        acc *= tl.load(scales_ptr + outputs)[:, None]
    if BIAS:
        acc += tl.load(bias_ptr + outputs)[:, None].to(tl.float32)
    return acc


# Not compiled again for a number of rows that divides by 16: steps that are no graphs have any.
@triton.jit(do_not_specialize=["M"])
def _fp8_few_rows(
    x_ptr,  # [M, K], f8 where rows are rounded
    row_scales_ptr,  # f32[M], of these
    weight_ptr,  # f8[N, K]; GATED: [2 N, K], gates then ups
    scales_ptr,  # f32[N], with GROUP [groups, N]; GATED: 2 N, as biases
    bias_ptr,  # [N]
    residual_ptr,  # [M, N]
    out_ptr,  # [M, N]
    partial_ptr,  # f32[SPLITS, M, N]; GATED: [2, SPLITS, M, N]
    done_ptr,  # i32[tiles]: splits that have ended, 0 between launches
    M,
    N,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,  # inputs of each output that are asked for before the kernels ahead have ended
    GROUP: tl.constexpr,  # inputs that share a scale; 0: all
    ROUNDS: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The weight is the tall operand of the product, so that the rows need not be padded to its height."""
    tile = tl.program_id(0)
    split = tl.program_id(1)
    outputs = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = rows[None, :] < M
    LENGTH: tl.constexpr = K // SPLITS
    inputs = split * LENGTH + tl.arange(0, BLOCK_K)
    weights = weight_ptr + outputs[:, None].to(tl.int64) * K + inputs[None, :]
    ups = weights + N.to(tl.int64) * K
    xs = x_ptr + rows[None, :] * K + inputs[:, None]
    stride = 2 * N if GATED else N
    first = split * LENGTH
    UP_GROUP: tl.constexpr = GROUP if GATED else 0
    scales = _group_scales(scales_ptr, first, outputs, stride, GROUP)
    up_scales = _group_scales(scales_ptr + N, first, outputs, stride, UP_GROUP)
    if AHEAD:
        asked = weight_ptr + outputs.to(tl.int64) * K + first
        ask(asked, AHEAD)
        if GATED:
            ask(asked + N.to(tl.int64) * K, AHEAD)
    wait(DEPENDENT)
    release(DEPENDENT)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for k in tl.range(0, LENGTH, BLOCK_K, num_stages=STAGES):
        x = tl.load(xs + k, mask=is_row, other=0.0)
        # Scales of the next step are on their way during this one's product.
        next_k = tl.minimum(first + k + BLOCK_K, K - 1)
        next_scales = _group_scales(scales_ptr, next_k, outputs, stride, GROUP)
        next_up_scales = _group_scales(scales_ptr + N, next_k, outputs, stride, UP_GROUP)
        acc = _added(acc, tl.load(weights + k), x, scales, BLOCK_K, GROUP)
        if GATED:
            up = _added(up, tl.load(ups + k), x, up_scales, BLOCK_K, GROUP)
        scales, up_scales = next_scales, next_up_scales
    offsets = rows[None, :] * N + outputs[:, None]
    is_last = True
    if SPLITS > 1:
        # The split that ends last adds the parts up.
        part = M * N
        tl.store(partial_ptr + split * part + offsets, acc, mask=is_row)
        if GATED:
            tl.store(partial_ptr + (SPLITS + split) * part + offsets, up, mask=is_row)
        tl.debug_barrier()
        counter = done_ptr + tl.program_id(2) * tl.num_programs(0) + tile
        is_last = tl.atomic_add(counter, 1, sem="acq_rel") == SPLITS - 1
        if is_last:
            acc = _total(partial_ptr, offsets, is_row, part, SPLITS)
            if GATED:
                up = _total(partial_ptr + SPLITS * part, offsets, is_row, part, SPLITS)
            tl.store(counter, 0)
    if is_last:
        acc = _ended(acc, row_scales_ptr, scales_ptr, bias_ptr, rows, outputs, is_row, GROUP, ROUNDS, BIAS)
        if GATED:
            up = _ended(up, row_scales_ptr, scales_ptr + N, bias_ptr + N, rows, outputs, is_row, GROUP, ROUNDS, BIAS)
            acc = gated(acc, up, GELU)
        if RESIDUAL:
            acc += tl.load(residual_ptr + offsets, mask=is_row, other=0.0).to(tl.float32)
        tl.store(out_ptr + offsets, acc.to(out_ptr.dtype.element_ty), mask=is_row)


class Fp8FewRows:
    """Multiplies up to `MOST_FP8_FEW_ROWS` rows, on one stream."""

    def __init__(self) -> None:
        self._done: Tensor | None = None

    def multiply(
        self,
        x: Tensor,
        row_scales: Tensor | None,
        weight: Tensor,
        scales: Tensor,
        tile: Fp8FewRowsTile,
        dtype: torch.dtype,
        *,
        group: int | None = None,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        is_gated: bool = False,
        gelu: bool = False,
    ) -> Tensor:
        """residual + f((x * row_scales) @ (weight * scales).T + bias), in `dtype`.

        x [rows, inputs], f8 if it has row_scales f32[rows, 1]; weight f8[outputs, inputs], scales f32[outputs, 1], or
        f32[groups, outputs] of `group` inputs each; bias [outputs], residual [rows, outputs] -> [rows, outputs].
        Gated: see `fp8_row_linear`.
        """
        rows, inputs = x.shape
        outputs = len(weight) // 2 if is_gated else len(weight)
        block = fp8_tile_rows(rows)
        tiles = outputs // tile.outputs, tile.splits, triton.cdiv(rows, block)
        if self._done is None:
            self._done = torch.zeros(MOST_FEW_TILES * _MOST_ROW_TILES, dtype=torch.int32, device=x.device)
        out = torch.empty(rows, outputs, dtype=dtype, device=x.device)
        halves = 2 if is_gated else 1
        partial = torch.empty(halves, tile.splits, rows, outputs, device=x.device) if tile.splits > 1 else scales
        dependent = has_dependent_launch(x.device)
        _fp8_few_rows[tiles](
            x,
            row_scales if row_scales is not None else scales,
            weight,
            scales,
            bias if bias is not None else x,
            residual if residual is not None else x,
            out,
            partial,
            self._done,
            rows,
            outputs,
            K=inputs,
            BLOCK_M=block,
            BLOCK_N=tile.outputs,
            BLOCK_K=tile.inputs,
            SPLITS=tile.splits,
            STAGES=tile.stages,
            AHEAD=tile.ahead if dependent else 0,
            GROUP=group or 0,
            ROUNDS=row_scales is not None,
            BIAS=bias is not None,
            RESIDUAL=residual is not None,
            GATED=is_gated,
            GELU=gelu,
            DEPENDENT=dependent,
            **options(warps=tile.warps, dependent=dependent),
        )
        return out
