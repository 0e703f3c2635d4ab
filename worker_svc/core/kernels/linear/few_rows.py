"""Products of a few rows with a weight, cut along the inputs so that small weights too keep the device reading."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker_svc.core.kernels.launch import has_dependent_launch, options, release, wait

_MIN_PROGRAMS, _MAX_PROGRAMS = 90, 132  # an H200 has 132 multiprocessors
_SPLITS = (1, 2, 4, 8)
_TILE_INPUTS = 128
_MANY_INPUTS = 4096
_FEW_ROWS = 32
_MIN_WIDE_PROGRAMS = 60
_MOST_WEIGHTS = 1 << 23  # of a weight that more than `_FEW_ROWS` rows are multiplied with


# Not compiled again for a number of rows that divides by 16: steps that are no graphs have any.
@triton.jit(do_not_specialize=["M"])
def _few_rows(
    x_ptr,  # [M, K]
    weight_ptr,  # [N, K]
    residual_ptr,  # [M, N]
    out_ptr,  # [M, N]
    partial_ptr,  # f32[SPLITS, M, N]
    done_ptr,  # i32[tiles]: splits that have ended, 0 between launches
    M,
    N,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    RESIDUAL: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The weight is the tall operand of the product, so that the rows need not be padded to its height."""
    tile = tl.program_id(0)
    split = tl.program_id(1)
    outputs = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.arange(0, BLOCK_M)
    is_row = rows[None, :] < M
    LENGTH: tl.constexpr = K // SPLITS
    inputs = split * LENGTH + tl.arange(0, BLOCK_K)
    weights = weight_ptr + outputs[:, None].to(tl.int64) * K + inputs[None, :]
    xs = x_ptr + rows[None, :] * K + inputs[:, None]
    wait(DEPENDENT)
    release(DEPENDENT)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for k in tl.range(0, LENGTH, BLOCK_K, num_stages=STAGES):
        acc = tl.dot(tl.load(weights + k), tl.load(xs + k, mask=is_row, other=0.0), acc)
    offsets = rows[None, :] * N + outputs[:, None]
    if SPLITS == 1:
        if RESIDUAL:
            acc += tl.load(residual_ptr + offsets, mask=is_row, other=0.0).to(tl.float32)
        tl.store(out_ptr + offsets, acc.to(out_ptr.dtype.element_ty), mask=is_row)
    else:
        # The split that ends last adds the parts up, always in the same order.
        tl.store(partial_ptr + split * M * N + offsets, acc, mask=is_row)
        tl.debug_barrier()
        ended = tl.atomic_add(done_ptr + tile, 1, sem="acq_rel")
        if ended == SPLITS - 1:
            total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for part in range(SPLITS):
                total += tl.load(partial_ptr + part * M * N + offsets, mask=is_row, other=0.0, cache_modifier=".cg")
            if RESIDUAL:
                total += tl.load(residual_ptr + offsets, mask=is_row, other=0.0).to(tl.float32)
            tl.store(out_ptr + offsets, total.to(out_ptr.dtype.element_ty), mask=is_row)
            tl.store(done_ptr + tile, 0)


@dataclass(frozen=True, slots=True)
class Tiling:
    """The cut of a product."""

    outputs: int  # of a tile
    inputs: int  # of a step of its loop
    splits: int  # of the inputs
    stages: int  # tiles on their way at once


def tiling(outputs: int, inputs: int, rows: int) -> Tiling | None:
    """The tiling whose programs all run at once and keep the device busy; None: the shape has none, cuBLAS is as good.

    As measured best on an H200: for up to 32 rows narrow tiles before splits, but wide ones where the inputs are many;
    for up to 64 rows, whose tiles are the tensor cores' own, wide ones always; large weights are cuBLAS's there.
    """
    is_few = rows <= _FEW_ROWS
    if not is_few and outputs * inputs > _MOST_WEIGHTS:
        return None
    fewest = _MIN_PROGRAMS if is_few else _MIN_WIDE_PROGRAMS
    for width in (32, 64) if is_few and inputs < _MANY_INPUTS else (64, 32) if is_few else (64,):
        for splits in _SPLITS:
            programs = outputs // width * splits
            divides = outputs % width == 0 and inputs % (splits * _TILE_INPUTS) == 0
            if divides and fewest <= programs <= _MAX_PROGRAMS:
                return Tiling(width, _TILE_INPUTS, splits, stages=(6 if width == 32 else 4) if is_few else 5)
    return None


class FewRows:
    """Multiplies up to `MAX_ROWS` rows, on one stream."""

    MAX_ROWS = 64

    def __init__(self) -> None:
        self._done: Tensor | None = None

    def multiply(self, x: Tensor, weight: Tensor, cut: Tiling, residual: Tensor | None = None) -> Tensor:
        """x @ weight.T + residual: x [rows, inputs], weight [outputs, inputs], residual [rows, outputs]."""
        rows, inputs = x.shape
        outputs = len(weight)
        if self._done is None:
            self._done = torch.zeros(_MAX_PROGRAMS, dtype=torch.int32, device=x.device)
        out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
        partial = torch.empty(cut.splits, rows, outputs, device=x.device) if cut.splits > 1 else out
        dependent = has_dependent_launch(x.device)
        _few_rows[(outputs // cut.outputs, cut.splits)](
            x,
            weight,
            residual if residual is not None else x,
            out,
            partial,
            self._done,
            rows,
            outputs,
            K=inputs,
            BLOCK_M=max(16, triton.next_power_of_2(rows)),
            BLOCK_N=cut.outputs,
            BLOCK_K=cut.inputs,
            SPLITS=cut.splits,
            STAGES=cut.stages,
            RESIDUAL=residual is not None,
            DEPENDENT=dependent,
            **options(warps=4, dependent=dependent),
        )
        return out
