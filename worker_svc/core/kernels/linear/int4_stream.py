"""Products of many rows with a weight of 4 bits that is decoded in registers, at about the speed of matrix units: for
Hopper.

Programs stay and take one tile after the other. Half of a tile's outputs each has four warps, which decode a block of
the weight while the other half's is multiplied; one more warp asks for rows and weights ahead of them. Where tiles are
few, programs have even shares of their blocks of inputs instead (`int4_parts`). Gluon has words for that, Triton has
none; Triton's interpreter knows nothing of Gluon.
"""

from functools import cache

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from worker_svc.core.kernels.barriers import make_barriers
from worker_svc.core.kernels.launch import INTERPRETED, multiprocessors, options
from worker_svc.core.kernels.linear.int4_ends import end_tile, keep_part
from worker_svc.core.kernels.linear.int4_numbers import Int4Weight
from worker_svc.core.kernels.linear.int4_operand import decode, halves, scaling_of
from worker_svc.core.kernels.linear.int4_parts import add_parts, blocks_of_share, make_parts
from worker_svc.core.kernels.linear.stream_k import steps_of_program, steps_of_tile, tiles_of_program
from worker_svc.core.kernels.linear.ways import STREAMED_INT4_OUTPUTS, Int4StreamTile
from worker_svc.core.kernels.words import BLOCK, WORDS

_HOPPER = (9, 0)
_BLOCK, _WORDS = gl.constexpr(BLOCK), gl.constexpr(WORDS)
_OUTPUTS = gl.constexpr(STREAMED_INT4_OUTPUTS // 2)  # of four warps
_INPUTS = gl.constexpr(64)  # that rows come with at a time
_ROW_BYTES, _WORD_STAGES = gl.constexpr(160 * 1024), gl.constexpr(4)  # of rows that are on their way or there
_WARPS = gl.constexpr(4)
# Of a thread at first; the warps that multiply then get what the one that asks does not need.
_REGISTERS = 168
_REGISTERS_TO_MULTIPLY, _REGISTERS_TO_ASK = gl.constexpr(232), gl.constexpr(40)


@gluon.jit
def _ask_for_words(words, word_tiles, ready, stage, tile, block, N, GATED: gl.constexpr):
    """Ask for a tile's words of a block."""
    EACH: gl.constexpr = words.block_type.shape[0]  # outputs
    barrier = ready.index(stage)
    mbarrier.expect(barrier, 2 * _OUTPUTS * _WORDS * 4)
    for part in gl.static_range(2 * _OUTPUTS // EACH):
        # Of gates 32, then as many ups, for each half.
        output = tile * 2 * _OUTPUTS + part * EACH
        if GATED:
            output = tile * _OUTPUTS + part // 2 * EACH + part % 2 * N
        to = word_tiles.index(stage).slice(part * EACH, EACH)
        tma.async_copy_global_to_shared(words, [output, block * _WORDS], barrier, to)


@gluon.jit
def _ask(
    x,
    words,
    rings,
    barriers,
    N,
    tiles,
    items,
    share,
    BLOCKS: gl.constexpr,
    GATED: gl.constexpr,
    STREAM_K: gl.constexpr,
):
    """The work of one warp."""
    row_tiles, word_tiles = rings
    rows_ready, rows_free, words_ready, words_free = barriers
    ROWS: gl.constexpr = x.block_type.shape[0]
    STAGES: gl.constexpr = row_tiles.shape[0]
    first_item, end_item, step = tiles_of_program(items, share, BLOCKS, STREAM_K)
    first, end = steps_of_tile(first_item, items, share, BLOCKS, STREAM_K)
    # No kernel before writes weights.
    early = gl.minimum(end - first, _WORD_STAGES)
    for stage in range(early):
        _ask_for_words(words, word_tiles, words_ready, stage, first_item % tiles, first + stage, N, GATED)
    gdc_wait()
    gdc_launch_dependents()
    count = 0
    for item in range(first_item, end_item, step):
        row_tile, tile = item // tiles, item % tiles
        first, end = steps_of_tile(item, items, share, BLOCKS, STREAM_K)
        for block in range(first, end):
            if count >= early:
                stage = count % _WORD_STAGES
                mbarrier.wait(words_free.index(stage), ((count // _WORD_STAGES) & 1) ^ 1)
                _ask_for_words(words, word_tiles, words_ready, stage, tile, block, N, GATED)
            for half in gl.static_range(2):
                place = 2 * count + half
                stage = place % STAGES
                barrier = rows_ready.index(stage)
                mbarrier.wait(rows_free.index(stage), ((place // STAGES) & 1) ^ 1)
                mbarrier.expect(barrier, ROWS * _INPUTS * 2)
                at = [row_tile * ROWS, block * _BLOCK + half * _INPUTS]
                tma.async_copy_global_to_shared(x, at, barrier, row_tiles.index(stage))
            count += 1


@gluon.jit
def _scales_of(scales_ptr, n, block, stride, GROUP: gl.constexpr):
    """Scales and zeros of a block, of outputs n."""
    return gl.load(scales_ptr + block * _BLOCK // GROUP * stride + n)


@gluon.jit
def _words_of(word_tiles, barriers, place, is_there, NTH: gl.constexpr, LAYOUT: gl.constexpr):
    """The words of a place in the ring, half of its outputs."""
    _, _, ready, _ = barriers
    stage = place % _WORD_STAGES
    mbarrier.wait(ready.index(stage), (place // _WORD_STAGES) & 1, pred=is_there)
    return word_tiles.index(stage).slice(NTH * _OUTPUTS, _OUTPUTS).load(LAYOUT)


@gluon.jit
def _times(acc, numbers, row_tiles, barriers, place):
    """acc + the product of decoded numbers with the rows of a place in the ring, begun."""
    ready, _, _, _ = barriers
    STAGES: gl.constexpr = row_tiles.shape[0]
    stage = place % STAGES
    mbarrier.wait(ready.index(stage), (place // STAGES) & 1)
    return warpgroup_mma(numbers, row_tiles.index(stage).permute((1, 0)), acc, is_async=True)


@gluon.jit
def _multiply(
    rings,
    barriers,
    pointers,
    parts_ptr,
    scales_ptr,
    M,
    N,
    tiles,
    items,
    share,
    BLOCKS: gl.constexpr,
    GROUP: gl.constexpr,
    GATED: gl.constexpr,
    BIAS: gl.constexpr,
    RESIDUAL: gl.constexpr,
    STREAM_K: gl.constexpr,
    NTH: gl.constexpr,
):
    """The work of the four warps of the `NTH` half of a tile's outputs."""
    row_tiles, word_tiles = rings
    _, rows_free, _, words_free = barriers
    STAGES: gl.constexpr = row_tiles.shape[0]
    ROWS: gl.constexpr = row_tiles.shape[1]
    HALF: gl.constexpr = _OUTPUTS // 2
    WRITTEN: gl.constexpr = HALF if GATED else _OUTPUTS
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [_WARPS, 1], [16, ROWS, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    # A thread has the words of two rows that matrix units want of it, of each four that follow each other.
    READ: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [32, 0]],
        lane_bases=[[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[8, 0], [16, 0]],
        block_bases=[],
        shape=[64, 16],
    )
    stride = N
    if GATED:
        stride = 2 * N
    first_item, end_item, step = tiles_of_program(items, share, BLOCKS, STREAM_K)
    total = steps_of_program(items, share, BLOCKS, STREAM_K)
    words = _words_of(word_tiles, barriers, 0, True, NTH, READ)
    count = 0
    for item in range(first_item, end_item, step):
        row_tile, tile = item // tiles, item % tiles
        first, end = steps_of_tile(item, items, share, BLOCKS, STREAM_K)
        output = (2 * tile + NTH) * WRITTEN
        place = gl.arange(0, _OUTPUTS, gl.SliceLayout(1, READ))
        n = output + place
        if GATED:
            n = output + place % HALF + place // HALF * N
        scaling = scaling_of(_scales_of(scales_ptr, n, first, stride, GROUP), row_tiles.dtype)
        acc = gl.zeros([_OUTPUTS, ROWS], gl.float32, SUMS)
        for block in range(first, end):
            packed = _scales_of(scales_ptr, n, gl.minimum(block + 1, BLOCKS - 1), stride, GROUP)
            low_words, high_words = halves(words)
            low = decode(low_words, scaling, row_tiles.dtype, OPERAND)
            acc = _times(acc, low, row_tiles, barriers, 2 * count)
            high = decode(high_words, scaling, row_tiles.dtype, OPERAND)
            acc = _times(acc, high, row_tiles, barriers, 2 * count + 1)
            words = _words_of(word_tiles, barriers, count + 1, count + 1 < total, NTH, READ)
            scaling = scaling_of(packed, row_tiles.dtype)
            # Matrix units are done before the next block is decoded: numbers would be written over those they read.
            acc = warpgroup_mma_wait(0, deps=(acc,))
            # Not as soon as they were asked for: reads of shared memory may wait in line after products.
            mbarrier.arrive(words_free.index(count % _WORD_STAGES))
            mbarrier.arrive(rows_free.index(2 * count % STAGES))
            mbarrier.arrive(rows_free.index((2 * count + 1) % STAGES))
            count += 1
        gdc_wait()  # kernels ahead may read what is written from here on
        if STREAM_K:
            if end - first < BLOCKS:
                part = 2 * gl.program_id(0) + (item != first_item).to(gl.int32)
                keep_part(acc, parts_ptr + part * (2 * _OUTPUTS * ROWS), NTH, GATED)
            else:
                end_tile(acc, pointers, output, row_tile * ROWS, M, N, GATED, BIAS, RESIDUAL)
        else:
            end_tile(acc, pointers, output, row_tile * ROWS, M, N, GATED, BIAS, RESIDUAL)


# Not compiled again for a number of rows that divides by 16: steps that are no graphs have any.
@gluon.jit(do_not_specialize=["M", "items", "share"])
def _int4_stream(
    x,  # [M, K]
    words,  # i32[N, K / 8]; GATED: [2 N, ...], gates then ups
    scales_ptr,  # i32[groups, N]; GATED: [groups, 2 N]
    bias_ptr,  # [N]
    residual_ptr,  # [M, N]
    out_ptr,  # [M, N]
    parts_ptr,  # see `make_parts`
    M,
    N,
    items,  # tiles
    share,  # STREAM_K: blocks of a program
    K: gl.constexpr,
    GROUP: gl.constexpr,
    GATED: gl.constexpr,
    BIAS: gl.constexpr,
    RESIDUAL: gl.constexpr,
    STREAM_K: gl.constexpr,
):
    BLOCKS: gl.constexpr = K // _BLOCK
    WRITTEN: gl.constexpr = _OUTPUTS if GATED else 2 * _OUTPUTS
    ROWS: gl.constexpr = x.block_type.shape[0]
    STAGES: gl.constexpr = _ROW_BYTES // (ROWS * _INPUTS * 2)
    row_tiles = gl.allocate_shared_memory(x.dtype, [STAGES, ROWS, _INPUTS], x.layout)
    word_tiles = gl.allocate_shared_memory(gl.int32, [_WORD_STAGES, 2 * _OUTPUTS, _WORDS], words.layout)
    rings = (row_tiles, word_tiles)
    barriers = (
        make_barriers(STAGES, 1),
        make_barriers(STAGES, 2),
        make_barriers(_WORD_STAGES, 1),
        make_barriers(_WORD_STAGES, 2),
    )
    pointers = (out_ptr, bias_ptr, residual_ptr)
    tiles = N // WRITTEN
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    rings, barriers, pointers, parts_ptr, scales_ptr, M, N, tiles, items, share, BLOCKS, GROUP, GATED,
                    BIAS, RESIDUAL, STREAM_K, 0,
                ),
            ),
            (
                _multiply,
                (
                    rings, barriers, pointers, parts_ptr, scales_ptr, M, N, tiles, items, share, BLOCKS, GROUP, GATED,
                    BIAS, RESIDUAL, STREAM_K, 1,
                ),
            ),
            (_ask, (x, words, rings, barriers, N, tiles, items, share, BLOCKS, GATED, STREAM_K)),
        ],
        [_WARPS, 1],
        [_REGISTERS_TO_MULTIPLY, _REGISTERS_TO_ASK],
    )  # fmt: skip


@cache
def has_int4_stream(device: torch.device) -> bool:
    """Return whether `multiply_int4_stream` can multiply there: a Hopper."""
    is_there = device.type == "cuda" and not INTERPRETED
    return is_there and torch.cuda.get_device_capability(device) == _HOPPER


def multiply_int4_stream(
    x: Tensor,
    weight: Int4Weight,
    tile: Int4StreamTile,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    is_gated: bool = False,
) -> Tensor:
    """residual + f(x @ weight.T) + bias: as `Int4Rows.multiply`."""
    rows, outputs = len(x), weight.outputs // 2 if is_gated else weight.outputs
    items = triton.cdiv(rows, tile.rows) * (weight.outputs // STREAMED_INT4_OUTPUTS)
    blocks, programs = weight.inputs // BLOCK, multiprocessors(x.device, 0)
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    if tile.stream_k:
        share = blocks_of_share(items, blocks, programs)
        programs = triton.cdiv(items * blocks, share)
        parts = make_parts(programs, tile.rows, x.device)
    else:
        share, programs, parts = 0, min(items, programs), out
    _int4_stream[(programs,)](
        _tiled(x, [tile.rows, _INPUTS.value], gl.bfloat16),
        _tiled(weight.numbers.flatten(1), [_OUTPUTS.value // 2 if is_gated else _OUTPUTS.value, WORDS], gl.int32),
        weight.scales.view(torch.int32),
        bias if bias is not None else x,
        residual if residual is not None else x,
        out,
        parts,
        rows,
        outputs,
        items,
        share,
        K=weight.inputs,
        GROUP=weight.group or weight.inputs,
        GATED=is_gated,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        STREAM_K=tile.stream_k,
        **options(warps=_WARPS.value, dependent=True, registers=_REGISTERS),
    )
    if tile.stream_k and share % blocks:
        add_parts(parts, share, blocks, out, bias=bias, residual=residual, is_gated=is_gated)
    return out


def _tiled(tensor: Tensor, block: list[int], dtype: gl.dtype) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(tensor, block, gl.NVMMASharedLayout.get_default_for(block, dtype))
