"""Products of a few rows with a weight, cut along the inputs so that small weights too keep the device reading."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker_svc.core.kernels.ahead import ask
from worker_svc.core.kernels.launch import has_dependent_launch, options, release, wait
from worker_svc.core.kernels.linear.ways import MOST_FEW_TILES, FewRowsTile


# Not compiled again for a number of rows that divides by 16: steps that are no graphs have any.
@triton.jit(do_not_specialize=["M"])
def _few_rows(
    x_ptr,  # [M, K]
    weight_ptr,  # [N, K]
    residual_ptr,  # [M, N]; of a bias all rows are one
    out_ptr,  # [M, N]
    partial_ptr,  # f32[SPLITS, M, N]
    done_ptr,  # i32[tiles]: splits that have ended, 0 between launches
    M,
    N,
    residual_stride,  # between rows
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,  # inputs of each output that are asked for before the kernels ahead have ended
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
    if AHEAD:
        ask(weight_ptr + outputs.to(tl.int64) * K + split * LENGTH, AHEAD * 2)
    wait(DEPENDENT)
    release(DEPENDENT)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for k in tl.range(0, LENGTH, BLOCK_K, num_stages=STAGES):
        acc = tl.dot(tl.load(weights + k), tl.load(xs + k, mask=is_row, other=0.0), acc)
    offsets = rows[None, :] * N + outputs[:, None]
    residual = residual_ptr + rows[None, :] * residual_stride + outputs[:, None]
    if SPLITS == 1:
        if RESIDUAL:
            acc += tl.load(residual, mask=is_row, other=0.0).to(tl.float32)
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
                total += tl.load(residual, mask=is_row, other=0.0).to(tl.float32)
            tl.store(out_ptr + offsets, total.to(out_ptr.dtype.element_ty), mask=is_row)
            tl.store(done_ptr + tile, 0)


class FewRows:
    """Multiplies up to `MOST_FEW_ROWS` rows, on one stream."""

    def __init__(self) -> None:
        self._done: Tensor | None = None

    def multiply(self, x: Tensor, weight: Tensor, tile: FewRowsTile, residual: Tensor | None = None) -> Tensor:
        """x @ weight.T + residual: x [rows, inputs], weight [outputs, inputs], residual [rows, outputs], a bias where
        it is expanded to these.
        """
        rows, inputs = x.shape
        outputs = len(weight)
        if self._done is None:
            self._done = torch.zeros(MOST_FEW_TILES, dtype=torch.int32, device=x.device)
        out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
        partial = torch.empty(tile.splits, rows, outputs, device=x.device) if tile.splits > 1 else out
        dependent = has_dependent_launch(x.device)
        _few_rows[(outputs // tile.outputs, tile.splits)](
            x,
            weight,
            residual if residual is not None else x,
            out,
            partial,
            self._done,
            rows,
            outputs,
            residual.stride(0) if residual is not None else 0,
            K=inputs,
            BLOCK_M=max(16, triton.next_power_of_2(rows)),
            BLOCK_N=tile.outputs,
            BLOCK_K=tile.inputs,
            SPLITS=tile.splits,
            STAGES=tile.stages,
            AHEAD=tile.ahead if dependent else 0,
            RESIDUAL=residual is not None,
            DEPENDENT=dependent,
            **options(warps=4, dependent=dependent),
        )
        return out
