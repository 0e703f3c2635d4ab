"""Products of a batch's rows with a weight, at about the speed at which the weight can be read: for Hopper.

One warp asks for tiles, ahead of those that multiply them; the weight's first ones are asked for before the kernel
ahead has ended, so that memory is busy between kernels, too. Gluon has words for that, Triton has none; Triton's
interpreter knows nothing of Gluon.
"""

from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from worker_svc.core.kernels.launch import INTERPRETED
from worker_svc.core.kernels.linear.batch_ends import end_split, end_whole
from worker_svc.core.kernels.linear.ways import MOST_BATCH_SPLITS, MULTIPROCESSORS, BatchTile

_HOPPER = (9, 0)
# Of a thread at first; the warps that multiply then get what the one that asks does not need.
_REGISTERS, _REGISTERS_TO_ASK = 168, gl.constexpr(40)


@gluon.jit
def _span(item, STEPS: gl.constexpr, SPLITS: gl.constexpr):
    """The first step through an item's inputs, and the one after its last."""
    split = item % SPLITS
    return split * STEPS // SPLITS, (split + 1) * STEPS // SPLITS


@gluon.jit
def _inputs(step, first, end, tile, DEPTH: gl.constexpr):
    """The first of a step's inputs: tiles begin at different ones, so that not all programs want the same rows' inputs
    at once.
    """
    return (first + (step - first + tile * 5) % (end - first)) * DEPTH


@gluon.jit
def _ask_for_weight(weight, wide, narrow, barrier, tile, k, N, GATED: gl.constexpr, NARROW: gl.constexpr):
    wide_weight, narrow_weight = weight
    if GATED:
        # Gates, then ups of the same outputs.
        WIDE: gl.constexpr = wide.shape[0] // 2
        REST: gl.constexpr = NARROW // 2
        first = tile * (WIDE + REST)
        tma.async_copy_global_to_shared(wide_weight, [first, k], barrier, wide.slice(0, WIDE))
        tma.async_copy_global_to_shared(wide_weight, [N + first, k], barrier, wide.slice(WIDE, WIDE))
        if NARROW > 0:
            tma.async_copy_global_to_shared(narrow_weight, [first + WIDE, k], barrier, narrow.slice(0, REST))
            tma.async_copy_global_to_shared(narrow_weight, [N + first + WIDE, k], barrier, narrow.slice(REST, REST))
    else:
        first = tile * (wide.shape[0] + NARROW)
        tma.async_copy_global_to_shared(wide_weight, [first, k], barrier, wide)
        if NARROW > 0:
            tma.async_copy_global_to_shared(narrow_weight, [first + wide.shape[0], k], barrier, narrow)


@gluon.jit
def _ask(
    weight,
    x,
    tiles,
    barriers,
    N,
    items,
    STEPS: gl.constexpr,
    SPLITS: gl.constexpr,
    GATED: gl.constexpr,
    NARROW: gl.constexpr,
):
    """The work of one warp."""
    wide, narrow, rows = tiles
    ready, free = barriers
    STAGES: gl.constexpr = wide.shape[0]
    DEPTH: gl.constexpr = wide.shape[2]
    BYTES: gl.constexpr = (wide.shape[1] + NARROW + rows.shape[1]) * DEPTH * 2
    AHEAD: gl.constexpr = STAGES if STAGES < STEPS // SPLITS else STEPS // SPLITS
    item = gl.program_id(0)
    first, end = _span(item, STEPS, SPLITS)
    for stage in range(AHEAD):
        tile = item // SPLITS
        k = _inputs(first + stage, first, end, tile, DEPTH)
        mbarrier.expect(ready.index(stage), BYTES)
        _ask_for_weight(weight, wide.index(stage), narrow.index(stage), ready.index(stage), tile, k, N, GATED, NARROW)
    gdc_wait()
    gdc_launch_dependents()
    count = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        tile = item // SPLITS
        first, end = _span(item, STEPS, SPLITS)
        for step in range(first, end):
            stage = count % STAGES
            k = _inputs(step, first, end, tile, DEPTH)
            barrier = ready.index(stage)
            if count >= AHEAD:
                mbarrier.wait(free.index(stage), ((count // STAGES) & 1) ^ 1)
                mbarrier.expect(barrier, BYTES)
                _ask_for_weight(weight, wide.index(stage), narrow.index(stage), barrier, tile, k, N, GATED, NARROW)
            tma.async_copy_global_to_shared(x, [0, k], barrier, rows.index(stage))
            count += 1


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
def _multiply(
    tiles,
    barriers,
    pointers,
    eps,
    sizes,
    STEPS: gl.constexpr,
    SPLITS: gl.constexpr,
    GATED: gl.constexpr,
    RESIDUAL: gl.constexpr,
    NORMED: gl.constexpr,
    NARROW: gl.constexpr,
    WARPS: gl.constexpr,
):
    """The work of all other warps."""
    wide, narrow, rows = tiles
    ready, free = barriers
    _, _, items, _ = sizes
    STAGES: gl.constexpr = wide.shape[0]
    WIDE: gl.constexpr = wide.shape[1]
    ROWS: gl.constexpr = rows.shape[1]
    INPUTS: gl.constexpr = STEPS * wide.shape[2]
    gdc_wait()
    count = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        first, end = _span(item, STEPS, SPLITS)
        y = gl.zeros([ROWS, WIDE], gl.float32, gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, WIDE, 16]))
        z = y
        if NARROW > 0:
            z = gl.zeros([ROWS, NARROW], gl.float32, gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, NARROW, 16]))
        squares = _no_squares(rows.index(0), WARPS)
        for step in range(first, end):
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
            mbarrier.arrive(free.index((count + STAGES - 1) % STAGES), pred=step > first)
            count += 1
        if NARROW > 0:
            y, z = warpgroup_mma_wait(0, deps=(y, z))
        else:
            y = warpgroup_mma_wait(0, deps=(y,))
        mbarrier.arrive(free.index((count + STAGES - 1) % STAGES))
        tile, split = item // SPLITS, item % SPLITS
        if SPLITS > 1:
            end_split(y, z, pointers, sizes, tile, split, SPLITS, RESIDUAL, NARROW, WARPS)
        else:
            end_whole(y, z, squares, pointers, eps, sizes, tile, INPUTS, GATED, RESIDUAL, NORMED, NARROW)


# Not compiled again for a number of rows that divides by 16: steps that are no graphs have any.
@gluon.jit(do_not_specialize=["M"])
def _batch_rows(
    wide_weight,  # [N, inputs]; GATED: [2 N, inputs], gates then ups
    narrow_weight,  # the same, in narrow tiles
    x,  # [M, inputs]
    out_ptr,  # [M, N]
    residual_ptr,  # [M, N]; of a bias all rows are one
    parts_ptr,  # f32[tiles, SPLITS, rows, outputs of a tile]
    ended_ptr,  # i32[tiles]
    eps,
    M,
    N,
    items,  # tiles, or splits of tiles
    residual_stride,  # between rows
    STEPS: gl.constexpr,
    SPLITS: gl.constexpr,  # power of two
    STAGES: gl.constexpr,
    GATED: gl.constexpr,
    RESIDUAL: gl.constexpr,
    NORMED: gl.constexpr,  # rows of x are divided by their root mean square
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
    rows = gl.allocate_shared_memory(x.dtype, [STAGES, x.block_type.shape[0], DEPTH], x.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    tiles = (wide, narrow, rows)
    barriers = (ready, free)
    pointers = (out_ptr, residual_ptr, parts_ptr, ended_ptr)
    sizes = (M, N, items, residual_stride)
    gl.warp_specialize(
        [
            (
                _multiply,
                (tiles, barriers, pointers, eps, sizes, STEPS, SPLITS, GATED, RESIDUAL, NORMED, NARROW, num_warps),
            ),
            (_ask, ((wide_weight, narrow_weight), x, tiles, barriers, N, items, STEPS, SPLITS, GATED, NARROW)),
        ],
        [1],
        [_REGISTERS_TO_ASK],
    )


@cache
def has_batch_rows(device: torch.device) -> bool:
    """Return whether `BatchRows` can multiply there: a Hopper with all its multiprocessors."""
    if device.type != "cuda" or INTERPRETED:
        return False
    properties = torch.cuda.get_device_properties(device)
    return (properties.major, properties.minor) == _HOPPER and properties.multi_processor_count >= MULTIPROCESSORS


class BatchRows:
    """Multiplies a batch's rows, bf16, on one stream: splits of a tile wait for each other, so that a device must not
    be shared with another that does the same at the same time.
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
        return self._launch(hidden, weight, tile, eps=eps)

    def _launch(
        self, x: Tensor, weight: Tensor, tile: BatchTile, residual: Tensor | None = None, eps: float | None = None
    ) -> Tensor:
        rows, inputs = x.shape
        is_gated = eps is not None
        halves = 2 if is_gated else 1
        outputs = len(weight) // halves
        tiles = outputs * halves // tile.outputs
        items = tiles * tile.splits
        if self._ended is None:
            # How often splits have met, which their number divides: numbers of splits have counters of their own.
            self._ended = torch.zeros(MOST_BATCH_SPLITS + 1, MULTIPROCESSORS, dtype=torch.int32, device=x.device)
        out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
        parts = torch.empty(items, tile.rows, tile.outputs, device=x.device) if tile.splits > 1 else out
        _batch_rows[(min(items, MULTIPROCESSORS),)](
            _tiled(weight, tile.wide // halves, tile.inputs),
            _tiled(weight, (tile.narrow or tile.wide) // halves, tile.inputs),
            _tiled(x, tile.rows, tile.inputs),
            out,
            residual if residual is not None else x,
            parts,
            self._ended[tile.splits],
            eps if eps is not None else 0.0,
            rows,
            outputs,
            items,
            residual.stride(0) if residual is not None else 0,
            STEPS=inputs // tile.inputs,
            SPLITS=tile.splits,
            STAGES=tile.stages,
            GATED=is_gated,
            RESIDUAL=residual is not None,
            NORMED=is_gated,
            NARROW=tile.narrow,
            num_warps=tile.rows // 16,
            maxnreg=_REGISTERS,
            launch_pdl=True,
        )
        return out


def _tiled(matrix: Tensor, rows: int, inputs: int) -> TensorDescriptor:
    shape = [rows, inputs]
    return TensorDescriptor.from_tensor(matrix, shape, gl.NVMMASharedLayout.get_default_for(shape, gl.bfloat16))
