"""Products of a batch's rows with a weight, at about the speed at which the weight can be read: for Hopper.

One warp asks for tiles, ahead of those that multiply them; the weight's first ones are asked for before the kernel
ahead has ended, so that memory is busy between kernels, too. Gluon has words for that, Triton has none; Triton's
interpreter knows nothing of Gluon.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_wait

from worker_svc.core.kernels.launch import INTERPRETED
from worker_svc.core.kernels.linear.batch_ends import add_parts, end_split, end_whole, keep_part
from worker_svc.core.kernels.linear.batch_loads import PIECE, ask, span
from worker_svc.core.kernels.linear.product import Product
from worker_svc.core.kernels.linear.stream_k import steps_of_tile, tiles_of_program
from worker_svc.core.kernels.linear.ways import MULTIPROCESSORS, BatchTile, Fp8BatchTile

_HOPPER = (9, 0)
# Of a thread at first; the warps that multiply then get what the one that asks does not need.
_REGISTERS, _REGISTERS_TO_ASK = 168, gl.constexpr(40)


@gluon.jit
def _squares(rows, WARPS: gl.constexpr):
    """Sums of the squares of 8 inputs each: [rows, inputs / 8]."""
    ROWS: gl.constexpr = rows.shape[0]
    PARTS: gl.constexpr = rows.shape[1] // 8
    FLAT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    DEEP: gl.constexpr = gl.BlockedLayout([1, 1, 8], [4, 8, 1], [WARPS, 1, 1], [2, 1, 0])
    x = rows.load(FLAT).to(gl.float32)
    return gl.sum(gl.convert_layout((x * x).reshape([ROWS, PARTS, 8]), DEEP, assert_trivial=True), 2)


@gluon.jit
def _no_squares(rows, WARPS: gl.constexpr):
    """Zeros like `_squares`."""
    ROWS: gl.constexpr = rows.shape[0]
    PARTS: gl.constexpr = rows.shape[1] // 8
    DEEP: gl.constexpr = gl.BlockedLayout([1, 1, 8], [4, 8, 1], [WARPS, 1, 1], [2, 1, 0])
    return gl.zeros([ROWS, PARTS], gl.float32, gl.SliceLayout(2, DEEP))


@gluon.jit
def _summed(
    y, z, squares, tiles, barriers, count, steps, NORMED: gl.constexpr, NARROW: gl.constexpr, WARPS: gl.constexpr
):
    """y and z with an item's products, and what `_squares` has of its rows; two steps are under way at once."""
    wide, narrow, rows = tiles
    ready, free = barriers
    STAGES: gl.constexpr = wide.shape[0]
    for step in range(steps):
        stage = count % STAGES
        mbarrier.wait(ready.index(stage), (count // STAGES) & 1)
        x = rows.index(stage)
        if NORMED:
            squares += _squares(x, WARPS)
        y = warpgroup_mma(x, wide.index(stage).permute((1, 0)), y, is_async=True)
        if NARROW > 0:
            z = warpgroup_mma(x, narrow.index(stage).permute((1, 0)), z, is_async=True)
            y, z = warpgroup_mma_wait(2, deps=(y, z))
        else:
            y = warpgroup_mma_wait(1, deps=(y,))
        # Now nobody reads the tiles of the step before.
        mbarrier.arrive(free.index((count + STAGES - 1) % STAGES), pred=step > 0)
        count += 1
    if NARROW > 0:
        y, z = warpgroup_mma_wait(0, deps=(y, z))
    else:
        y = warpgroup_mma_wait(0, deps=(y,))
    mbarrier.arrive(free.index((count + STAGES - 1) % STAGES))
    return y, z, squares


@gluon.jit
def _summed_by_steps(y, z, tiles, barriers, count, steps, NARROW: gl.constexpr):
    """As `_summed`, of 8-bit floats: a step's sums are added in fp32, since matrix units keep 14 bits of theirs."""
    wide, narrow, rows = tiles
    ready, free = barriers
    STAGES: gl.constexpr = wide.shape[0]
    zeros = gl.zeros_like(y)
    for _ in range(steps):
        stage = count % STAGES
        mbarrier.wait(ready.index(stage), (count // STAGES) & 1)
        x = rows.index(stage)
        part = warpgroup_mma(x, wide.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
        if NARROW > 0:
            rest = gl.zeros_like(z)
            rest = warpgroup_mma(x, narrow.index(stage).permute((1, 0)), rest, use_acc=False, is_async=True)
            part, rest = warpgroup_mma_wait(0, deps=(part, rest))
            z += rest
        else:
            part = warpgroup_mma_wait(0, deps=(part,))
        mbarrier.arrive(free.index(stage))
        y += part
        count += 1
    return y, z


@gluon.jit
def _multiply(
    tiles,
    barriers,
    pointers,
    eps,
    sizes,
    share,
    STEPS: gl.constexpr,
    SPLITS: gl.constexpr,
    STREAM_K: gl.constexpr,
    GATED: gl.constexpr,
    RESIDUAL: gl.constexpr,
    NORMED: gl.constexpr,
    SCALED: gl.constexpr,
    NARROW: gl.constexpr,
    WARPS: gl.constexpr,
):
    """The work of all other warps."""
    wide, _, rows = tiles
    _, _, items, _ = sizes
    WIDE: gl.constexpr = wide.shape[1]
    ROWS: gl.constexpr = rows.shape[1]
    INPUTS: gl.constexpr = STEPS * wide.shape[2]
    DEEP: gl.constexpr = 256 // rows.dtype.primitive_bitwidth  # inputs that matrix units take at once
    gdc_wait()
    count = 0
    first_item, end_item, by = tiles_of_program(items, share, STEPS, STREAM_K)
    for item in range(first_item, end_item, by):
        if SPLITS > 1:
            first, end = span(item, STEPS, SPLITS)
        else:
            first, end = steps_of_tile(item, items, share, STEPS, STREAM_K)
        y = gl.zeros([ROWS, WIDE], gl.float32, gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, WIDE, DEEP]))
        z = y
        if NARROW > 0:
            z = gl.zeros([ROWS, NARROW], gl.float32, gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, NARROW, DEEP]))
        squares = _no_squares(rows.index(0), WARPS)
        if SCALED:
            y, z = _summed_by_steps(y, z, tiles, barriers, count, end - first, NARROW)
        else:
            y, z, squares = _summed(y, z, squares, tiles, barriers, count, end - first, NORMED, NARROW, WARPS)
        squares = gl.sum(squares, 1)
        count += end - first
        if SPLITS > 1:
            tile, split = item // SPLITS, item % SPLITS
            end_split(y, z, pointers, sizes, tile, split, SPLITS, RESIDUAL, SCALED, NARROW, WARPS)
        elif STREAM_K:
            if first > 0:
                keep_part(y, squares, pointers, sizes)
            else:
                last = (item * STEPS + STEPS - 1) // share
                y, squares = add_parts(y, squares, pointers, sizes, last)
                end_whole(y, z, squares, pointers, eps, sizes, item, INPUTS, GATED, RESIDUAL, NORMED, SCALED, NARROW)
        else:
            end_whole(y, z, squares, pointers, eps, sizes, item, INPUTS, GATED, RESIDUAL, NORMED, SCALED, NARROW)


# Not compiled again for a number of rows that divides by 16: steps that are no graphs have any.
@gluon.jit(do_not_specialize=["M", "share"])
def _batch_rows(
    wide_weight,  # [N, inputs]; GATED: [2 N, inputs], gates then ups
    narrow_weight,  # the same, in narrow tiles
    x,  # [M, inputs]
    out_ptr,  # [M, N]
    residual_ptr,  # [M, N]; of a bias all rows are one
    # f32[tiles, SPLITS, rows, outputs of a tile]; STREAM_K: of each program f32[rows, outputs of a tile] and, after
    # these, f32[rows] of squares
    parts_ptr,
    # i32[tiles], whose sign tells of each how often its splits have met: odd or even; STREAM_K: i32[programs], 1 of
    # those whose part is there and not taken
    ended_ptr,
    row_scales_ptr,  # f32[M]
    scales_ptr,  # f32[N]; GATED: [2 N]
    eps,
    M,
    N,
    items,  # tiles, or splits of tiles
    residual_stride,  # between rows
    share,  # STREAM_K: steps of a program
    ROWS: gl.constexpr,  # that there is room for
    STEPS: gl.constexpr,
    SPLITS: gl.constexpr,
    STREAM_K: gl.constexpr,  # programs have even shares of all tiles' steps
    STAGES: gl.constexpr,
    GATED: gl.constexpr,
    RESIDUAL: gl.constexpr,
    NORMED: gl.constexpr,  # rows of x are divided by their root mean square
    SCALED: gl.constexpr,  # x and weight are 8-bit floats
    NARROW: gl.constexpr,
    num_warps: gl.constexpr,
):
    DEPTH: gl.constexpr = x.block_type.shape[1]
    HALVES: gl.constexpr = 2 if GATED else 1
    WIDE: gl.constexpr = wide_weight.block_type.shape[0] * HALVES
    wide = gl.allocate_shared_memory(x.dtype, [STAGES, WIDE, DEPTH], wide_weight.layout)
    narrow = wide
    if NARROW > 0:
        narrow = gl.allocate_shared_memory(x.dtype, [STAGES, NARROW, DEPTH], narrow_weight.layout)
    rows = gl.allocate_shared_memory(x.dtype, [STAGES, ROWS, DEPTH], x.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    tiles = (wide, narrow, rows)
    barriers = (ready, free)
    pointers = (out_ptr, residual_ptr, parts_ptr, ended_ptr, row_scales_ptr, scales_ptr)
    sizes = (M, N, items, residual_stride)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    tiles, barriers, pointers, eps, sizes, share, STEPS, SPLITS, STREAM_K, GATED, RESIDUAL, NORMED,
                    SCALED, NARROW, num_warps,
                ),
            ),
            (
                ask,
                (
                    (wide_weight, narrow_weight), x, tiles, barriers, M, N, items, share, STEPS, SPLITS, STREAM_K,
                    GATED, NARROW,
                ),
            ),
        ],
        [1],
        [_REGISTERS_TO_ASK],
    )  # fmt: skip


@cache
def has_batch_rows(device: torch.device) -> bool:
    """Return whether `BatchRows` can multiply there: a Hopper with all its multiprocessors."""
    if device.type != "cuda" or INTERPRETED:
        return False
    properties = torch.cuda.get_device_properties(device)
    return (properties.major, properties.minor) == _HOPPER and properties.multi_processor_count >= MULTIPROCESSORS


class RowScales(NamedTuple):
    """What a product of 8-bit floats is multiplied with."""

    of_rows: Tensor  # f32[rows, 1]
    of_outputs: Tensor  # f32[outputs, 1]; of a gated product gates, then ups


class BatchRows:
    """Multiplies a batch's rows, bf16 or 8-bit floats, on one stream: programs that have parts of a tile wait for each
    other, so that a device must not be shared with another that does the same at the same time.
    """

    def __init__(self) -> None:
        self._ended: Tensor | None = None

    def multiply(self, x: Tensor, weight: Tensor, tile: BatchTile, residual: Tensor | None = None) -> Tensor:
        """x @ weight.T + residual: x [rows, inputs], weight [outputs, inputs], residual [rows, outputs], a bias where
        it is expanded to these.
        """
        return self._launch(x, weight, tile, residual)

    def gate(self, hidden: Tensor, weight: Tensor, tile: BatchTile, eps: float) -> Tensor:
        """silu(gate) * up of hidden / rms(hidden): hidden [rows, inputs], weight [2 * outputs, inputs], gates then ups
        -> [rows, outputs]; a tile without splits.
        """
        return self._launch(hidden, weight, tile, is_gated=True, eps=eps)

    def multiply_fp8(
        self,
        x: Tensor,
        weight: Tensor,
        scales: RowScales,
        tile: Fp8BatchTile,
        dtype: torch.dtype,
        residual: Tensor | None = None,
        *,
        is_gated: bool = False,
    ) -> Tensor:
        """x @ weight.T * scales + residual, in `dtype`: x f8[rows, inputs], weight f8[outputs, inputs], the rest as of
        `multiply`; gated, silu(gate) * up instead of the sum, as of `gate` but for the norm.
        """
        return self._launch(x, weight, tile, residual, is_gated=is_gated, scales=scales, dtype=dtype)

    def _launch(
        self,
        x: Tensor,
        weight: Tensor,
        tile: BatchTile | Fp8BatchTile,
        residual: Tensor | None = None,
        *,
        is_gated: bool = False,
        eps: float | None = None,
        scales: RowScales | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> Tensor:
        rows, inputs = x.shape
        halves = 2 if is_gated else 1
        outputs = len(weight) // halves
        items = outputs * halves // tile.outputs * tile.splits
        programs, share, stream_k = min(items, MULTIPROCESSORS), 0, False
        if self._ended is None:
            self._ended = torch.zeros(2, MULTIPROCESSORS, dtype=torch.int32, device=x.device)
        out = torch.empty(rows, outputs, dtype=dtype, device=x.device)
        parts, ended = out, self._ended[0]
        if isinstance(tile, BatchTile) and tile.stream_k:
            stream_k, product = True, Product("gated", len(weight), inputs)
            programs, share = tile.programs(product), tile.share(product)
            parts, ended = torch.empty(programs, tile.rows * (tile.outputs + 1), device=x.device), self._ended[1]
        elif tile.splits > 1:
            parts = torch.empty(items, tile.rows, tile.outputs, device=x.device)
        _batch_rows[(programs,)](
            _tiled(weight, tile.wide // halves, tile.inputs),
            _tiled(weight, (tile.narrow or tile.wide) // halves, tile.inputs),
            _tiled(x, PIECE.value, tile.inputs),
            out,
            residual if residual is not None else out,
            parts,
            ended,
            scales.of_rows if scales is not None else out,
            scales.of_outputs if scales is not None else out,
            eps if eps is not None else 0.0,
            rows,
            outputs,
            items,
            residual.stride(0) if residual is not None else 0,
            share,
            STEPS=inputs // tile.inputs,
            ROWS=tile.rows,
            SPLITS=tile.splits,
            STREAM_K=stream_k,
            STAGES=tile.stages,
            GATED=is_gated,
            RESIDUAL=residual is not None,
            NORMED=eps is not None,
            SCALED=scales is not None,
            NARROW=tile.narrow,
            num_warps=tile.rows // 16,
            maxnreg=_REGISTERS,
            launch_pdl=True,
        )
        return out


def _tiled(matrix: Tensor, rows: int, inputs: int) -> TensorDescriptor:
    shape = [rows, inputs]
    dtype = gl.bfloat16 if matrix.dtype is torch.bfloat16 else gl.float8e4nv
    return TensorDescriptor.from_tensor(matrix, shape, gl.NVMMASharedLayout.get_default_for(shape, dtype))
