"""Products of many pairs with the weights of their experts, of pairs that lie in the order of experts: for Hopper.

Programs stay and take one tile of an expert's pairs after the other. Half of a tile each has four warps, which
multiply; one more warp asks for rows and weights ahead of them. Gluon has words for that, Triton has none; Triton's
interpreter knows nothing of Gluon.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from worker_svc.core.kernels.barriers import make_barriers
from worker_svc.core.kernels.experts.routing import Routed
from worker_svc.core.kernels.experts.sorting import SortedPairs
from worker_svc.core.kernels.experts.tiles import add_up, most_tiles
from worker_svc.core.kernels.experts.tuning import FEWEST_STREAMED_PAIRS, Tile
from worker_svc.core.kernels.experts.weights import FLOATS, ExpertWeights
from worker_svc.core.kernels.launch import (
    INTERPRETED,
    has_dependent_launch,
    multiprocessors,
    options,
    release,
    wait,
)

_HOPPER = (9, 0)
_TILE = Tile(pairs=128, outputs=256, inputs=64, warps=4, stages=4)
_PAIRS, _OUTPUTS, _INPUTS = gl.constexpr(_TILE.pairs), gl.constexpr(_TILE.outputs), gl.constexpr(_TILE.inputs)
_WARPS, _STAGES = gl.constexpr(_TILE.warps), gl.constexpr(_TILE.stages)
_HALF = gl.constexpr(_TILE.pairs // 2)
_LAID_TILES = 16  # by a program
_ALIGNMENT = 4  # of columns, in numbers: kernels are compiled again for pointers that are not aligned
# Of a thread at first; the warps that multiply then get what those that ask do not need.
_REGISTERS = 168
_REGISTERS_TO_MULTIPLY, _REGISTERS_TO_ASK = gl.constexpr(224), gl.constexpr(56)


@dataclass(frozen=True, slots=True)
class LaidTiles:
    """Tiles of pairs by expert; those after the last have no pairs."""

    experts: Tensor  # i32[tiles]
    firsts: Tensor  # i32[tiles]: where in `SortedPairs.order` their pairs begin
    lengths: Tensor  # i32[tiles]: pairs

    def __len__(self) -> int:
        return len(self.experts)


@triton.jit(do_not_specialize=["tiles"])
def _lay_tiles(
    counts_ptr,  # see `SortedPairs`, as the next
    firsts_ptr,
    out_experts_ptr,  # see `LaidTiles`, as the next
    out_firsts_ptr,
    out_lengths_ptr,
    tiles,
    EXPERTS: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    PADDED: tl.constexpr = triton.next_power_of_2(EXPERTS)
    experts = tl.arange(0, PADDED)
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wait(DEPENDENT)
    release(DEPENDENT)
    counts = tl.load(counts_ptr + experts, mask=experts < EXPERTS, other=0)
    firsts = tl.load(firsts_ptr + experts, mask=experts < EXPERTS, other=0)
    own = (counts + PAIRS - 1) // PAIRS
    ends = tl.cumsum(own, 0)
    # Of an expert's tiles.
    place = places[:, None] - (ends - own)[None, :]
    is_own = (place >= 0) & (place < own[None, :])
    lengths = tl.minimum(counts[None, :] - place * PAIRS, PAIRS)
    is_tile = places < tiles
    tl.store(out_experts_ptr + places, tl.sum(tl.where(is_own, experts[None, :], 0), 1), mask=is_tile)
    tl.store(out_firsts_ptr + places, tl.sum(tl.where(is_own, firsts[None, :] + place * PAIRS, 0), 1), mask=is_tile)
    tl.store(out_lengths_ptr + places, tl.sum(tl.where(is_own, lengths, 0), 1), mask=is_tile)


@gluon.jit
def _tile_of(columns, item, items, PARTS: gl.constexpr):
    """The expert, the first place and the pairs of an item's tile; no pairs after the last item."""
    experts, firsts, lengths = columns
    is_there = item < items
    tile = item // PARTS
    return (
        gl.load(experts + tile, mask=is_there, other=0),
        gl.load(firsts + tile, mask=is_there, other=0),
        gl.load(lengths + tile, mask=is_there, other=0),
    )


@gluon.jit
def _ask(
    x,
    weight,
    columns,
    items,
    tiles,
    barriers,
    N: gl.constexpr,
    K: gl.constexpr,
    PARTS: gl.constexpr,
):
    """The work of one warp."""
    ready, free = barriers
    rows, weights = tiles
    gdc_wait()
    gdc_launch_dependents()
    count = 0
    following = _tile_of(columns, gl.program_id(0), items, PARTS)
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        expert, first, length = following
        following = _tile_of(columns, item + gl.num_programs(0), items, PARTS)
        if length > 0:
            row = expert * N + item % PARTS * _OUTPUTS
            for k in range(0, K, _INPUTS):
                stage = count % _STAGES
                mbarrier.wait(free.index(stage), ((count // _STAGES) & 1) ^ 1)
                mbarrier.expect(ready.index(stage), (_PAIRS + _OUTPUTS) * _INPUTS * 2)
                tma.async_copy_global_to_shared(x, [first, k], ready.index(stage), rows.index(stage))
                tma.async_copy_global_to_shared(weight, [row, k], ready.index(stage), weights.index(stage))
                count += 1


@gluon.jit
def _pass(barriers, count, STEPS: gl.constexpr):
    """Nothing is multiplied of a tile's steps: there are no pairs."""
    ready, free = barriers
    for step in range(STEPS):
        stage = (count + step) % _STAGES
        mbarrier.wait(ready.index(stage), ((count + step) // _STAGES) & 1)
        mbarrier.arrive(free.index(stage))


@gluon.jit
def _products(tiles, barriers, count, STEPS: gl.constexpr, NTH: gl.constexpr):
    """Of half a tile's pairs, f32[pairs, outputs]."""
    ready, free = barriers
    rows, weights = tiles
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [_WARPS, 1], [16, _OUTPUTS, 16])
    y = gl.zeros([_HALF, _OUTPUTS], gl.float32, LAYOUT)
    for step in range(STEPS):
        stage = (count + step) % _STAGES
        mbarrier.wait(ready.index(stage), ((count + step) // _STAGES) & 1)
        x = rows.index(stage).slice(NTH * _HALF, _HALF)
        y = warpgroup_mma(x, weights.index(stage).permute((1, 0)), y, is_async=True)
        y = warpgroup_mma_wait(1, deps=(y,))
        # Now nobody of this half reads the tiles of the step before.
        mbarrier.arrive(free.index((count + step + _STAGES - 1) % _STAGES), pred=step > 0)
    y = warpgroup_mma_wait(0, deps=(y,))
    mbarrier.arrive(free.index((count + STEPS + _STAGES - 1) % _STAGES))
    return y


@gluon.jit
def _store(y, out_ptr, rows, is_row, column, N: gl.constexpr, LAYOUT: gl.constexpr):
    """Write [pairs, outputs] into these rows of out, from a column on."""
    columns = column + gl.arange(0, y.shape[1], gl.SliceLayout(0, LAYOUT))
    offsets = rows.to(gl.int64)[:, None] * N + columns[None, :]
    out = gl.convert_layout(y.to(out_ptr.dtype.element_ty), LAYOUT)
    gl.store(out_ptr + offsets, out, mask=is_row[:, None])


@gluon.jit
def _multiply(
    columns,
    items,
    tiles,
    barriers,
    order_ptr,
    weights_ptr,
    out_ptr,
    N: gl.constexpr,
    STEPS: gl.constexpr,
    PARTS: gl.constexpr,
    NTH: gl.constexpr,
):
    """The work of the four warps of the `NTH` half of a tile's pairs."""
    COLUMNS: gl.constexpr = _OUTPUTS // 2  # that are written at a time
    FLAT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [_WARPS, 1], [1, 0])
    gdc_wait()
    count = 0
    following = _tile_of(columns, gl.program_id(0), items, PARTS)
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        _, first, length = following
        following = _tile_of(columns, item + gl.num_programs(0), items, PARTS)
        if length > NTH * _HALF:
            places = NTH * _HALF + gl.arange(0, _HALF, gl.SliceLayout(1, FLAT))
            pairs = gl.load(order_ptr + first + places, mask=places < length, other=0)
            y = _products(tiles, barriers, count, STEPS, NTH)
            weights = gl.convert_layout(gl.load(weights_ptr + pairs), gl.SliceLayout(1, y.type.layout))
            y *= weights[:, None]
            low, high = y.reshape([_HALF, 2, COLUMNS]).permute(0, 2, 1).split()
            column = item % PARTS * _OUTPUTS
            _store(low, out_ptr, pairs, places < length, column, N, FLAT)
            _store(high, out_ptr, pairs, places < length, column + COLUMNS, N, FLAT)
        elif length > 0:
            _pass(barriers, count, STEPS)
        if length > 0:
            count += STEPS


@gluon.jit(do_not_specialize=["items"])
def _stream_products(
    x,  # [pairs, K], by place in the order
    weight,  # [EXPERTS N, K]
    order_ptr,
    weights_ptr,  # f32[pairs]
    experts_ptr,  # see `LaidTiles`, as the next
    firsts_ptr,
    lengths_ptr,
    out_ptr,  # [pairs, N]
    items,  # tiles times parts of the outputs
    N: gl.constexpr,
    K: gl.constexpr,
):
    PARTS: gl.constexpr = N // _OUTPUTS
    STEPS: gl.constexpr = K // _INPUTS
    rows = gl.allocate_shared_memory(x.dtype, [_STAGES, _PAIRS, _INPUTS], x.layout)
    weights = gl.allocate_shared_memory(x.dtype, [_STAGES, _OUTPUTS, _INPUTS], weight.layout)
    barriers = (make_barriers(_STAGES, 1), make_barriers(_STAGES, 2))
    tiles = (rows, weights)
    columns = (experts_ptr, firsts_ptr, lengths_ptr)
    gl.warp_specialize(
        [
            (
                _multiply,
                (columns, items, tiles, barriers, order_ptr, weights_ptr, out_ptr, N, STEPS, PARTS, 0),
            ),
            (
                _multiply,
                (columns, items, tiles, barriers, order_ptr, weights_ptr, out_ptr, N, STEPS, PARTS, 1),
            ),
            (_ask, (x, weight, columns, items, tiles, barriers, N, K, PARTS)),
        ],
        [_WARPS, 1],
        [_REGISTERS_TO_MULTIPLY, _REGISTERS_TO_ASK],
    )


def can_stream(x: Tensor, weight: ExpertWeights, num_pairs: int) -> bool:
    """Return whether products of experts without biases are made here: of many pairs, on a Hopper, in 16 bits."""
    if INTERPRETED or x.device.type != "cuda" or torch.cuda.get_device_capability(x.device) != _HOPPER:
        return False
    is_form = weight.form == FLOATS and x.element_size() == 2
    is_whole = weight.outputs % _TILE.outputs == 0 and weight.inputs % _TILE.inputs == 0
    return is_form and is_whole and num_pairs >= FEWEST_STREAMED_PAIRS * weight.count


def lay_tiles(pairs: SortedPairs) -> LaidTiles:
    """The tiles of all experts, and more, as many as any routing needs."""
    num_pairs, num_experts, device = len(pairs.order), len(pairs.counts), pairs.order.device
    number = triton.cdiv(most_tiles(num_pairs, num_experts, _TILE), _ALIGNMENT) * _ALIGNMENT
    laid = LaidTiles(*torch.empty(3, number, dtype=torch.int32, device=device))
    dependent = has_dependent_launch(device)
    _lay_tiles[(triton.cdiv(number, _LAID_TILES),)](
        pairs.counts,
        pairs.firsts,
        laid.experts,
        laid.firsts,
        laid.lengths,
        number,
        EXPERTS=num_experts,
        PAIRS=_TILE.pairs,
        BLOCK=_LAID_TILES,
        DEPENDENT=dependent,
        **options(warps=4, dependent=dependent),
    )
    return laid


def add_streamed(x: Tensor, weight: ExpertWeights, routed: Routed, pairs: SortedPairs, residual: Tensor) -> None:
    """As `add_tiles`, of x [pairs, inputs] in the order of `pairs`, without biases."""
    add_up(stream_products(x, weight, routed, pairs), residual)


def stream_products(x: Tensor, weight: ExpertWeights, routed: Routed, pairs: SortedPairs) -> Tensor:
    """The products of each pair, weighted: x [pairs, inputs], in the order of `pairs`, weight [experts, outputs,
    inputs] -> [pairs, outputs], by pair.
    """
    tiles = lay_tiles(pairs)
    out = torch.empty(len(x), weight.outputs, dtype=x.dtype, device=x.device)
    items = len(tiles) * (weight.outputs // _TILE.outputs)
    _stream_products[(min(items, multiprocessors(x.device, 0)),)](
        _tiled(x, _TILE.pairs),
        _tiled(weight.numbers.flatten(0, 1), _TILE.outputs),
        pairs.order,
        routed.weights,
        tiles.experts,
        tiles.firsts,
        tiles.lengths,
        out,
        items,
        N=weight.outputs,
        K=weight.inputs,
        **options(warps=_TILE.warps, dependent=True, registers=_REGISTERS),
    )
    return out


def _tiled(tensor: Tensor, rows: int) -> TensorDescriptor:
    block = [rows, _TILE.inputs]
    return TensorDescriptor.from_tensor(tensor, block, gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16))
