"""Attention of chunks of prompts over a paged context, at about the speed of matrix units: for Hopper.

Programs stay and take one tile of queries after the other. Of two heads of a tile each has four warps, which multiply
the next keys while they weigh the last ones; one more warp asks for keys and values ahead of them. Gluon has words for
that, Triton has none; Triton's interpreter knows nothing of Gluon.
"""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from worker_svc.core.kernels.attention.prefill import QUERY_TILE, PrefillTiles
from worker_svc.core.kernels.barriers import make_barriers
from worker_svc.core.kernels.launch import INTERPRETED, multiprocessors, options

_HOPPER = (9, 0)
_BLOCK = 16  # tokens of a block of the cache
_HEAD_DIM = 128
_KEYS = gl.constexpr(128)  # of a tile
_STAGES = gl.constexpr(2)
_WARPS = gl.constexpr(4)  # of a head
_LOG2E = 1.4426950408889634
# Of a thread at first; the warps that attend then get what the one that asks does not need.
_REGISTERS = 168
_REGISTERS_TO_ATTEND, _REGISTERS_TO_ASK = gl.constexpr(224), gl.constexpr(56)


@gluon.jit
def _tile_of(columns, count, items, PAIRS: gl.constexpr):
    """The tile and the pair of heads that a program attends to as its `count`th, and what `PrefillTiles` says of it.

    The first tiles are the longest: a program has the first of a round and the last by turns. After all are tiles of no
    rows.
    """
    rows, positions, lengths, slots = columns
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    item = count * programs + gl.where(count % 2 == 0, program, programs - 1 - program)
    is_there = item < items
    tile = item // PAIRS
    return (
        item % PAIRS,
        gl.load(rows + tile, mask=is_there, other=0).to(gl.int32),
        gl.load(positions + tile, mask=is_there, other=0).to(gl.int32),
        gl.load(lengths + tile, mask=is_there, other=0).to(gl.int32),
        gl.load(slots + tile, mask=is_there, other=0),
    )


@gluon.jit
def _block_of(table, position, last, blocks, BLOCK: gl.constexpr):
    """The block with this position; after a context's end are zeros, since no block has the number that there is one
    more than.
    """
    is_there = (position >= 0) & (position < last)
    return gl.where(is_there, gl.load(table + position // BLOCK, mask=is_there, other=0), blocks)


@gluon.jit
def _blocks_of(table, start, last, blocks, BLOCK: gl.constexpr):
    """Those of a tile."""
    return (
        _block_of(table, start, last, blocks, BLOCK),
        _block_of(table, start + BLOCK, last, blocks, BLOCK),
        _block_of(table, start + 2 * BLOCK, last, blocks, BLOCK),
        _block_of(table, start + 3 * BLOCK, last, blocks, BLOCK),
        _block_of(table, start + 4 * BLOCK, last, blocks, BLOCK),
        _block_of(table, start + 5 * BLOCK, last, blocks, BLOCK),
        _block_of(table, start + 6 * BLOCK, last, blocks, BLOCK),
        _block_of(table, start + 7 * BLOCK, last, blocks, BLOCK),
    )


@gluon.jit
def _copy(cells, tiles, ready, free, count, blocks, start, last, kv_head):
    """Ask for a tile of keys, or of values, after nobody reads what is there."""
    BLOCK: gl.constexpr = cells.block_type.shape[2]
    D: gl.constexpr = cells.block_type.shape[3]
    stage = count % _STAGES
    mbarrier.wait(free.index(stage), ((count // _STAGES) & 1) ^ 1)
    mbarrier.expect(ready.index(stage), _KEYS * D * 2)
    for each in gl.static_range(_KEYS // BLOCK):
        # A context's last tokens come last in their block: what is ahead of a block is zeros.
        before = gl.minimum(0, gl.maximum(last - start - each * BLOCK, 0) - BLOCK)
        at = [blocks[each], kv_head, before, 0]
        tma.async_copy_global_to_shared(cells, at, ready.index(stage), tiles.index(stage).slice(each * BLOCK, BLOCK, 2))


@gluon.jit
def _ask(
    q_tile,
    tiles,
    barriers,
    tensors,
    columns,
    tables,
    items,
    G: gl.constexpr,
    PAIRS: gl.constexpr,
):
    """The work of one warp."""
    asked, read, keys_ready, keys_free, values_ready, values_free = barriers
    key_tiles, value_tiles = tiles
    queries, keys, values = tensors
    tables_ptr, table_stride, blocks = tables
    BLOCK: gl.constexpr = keys.block_type.shape[2]
    D: gl.constexpr = keys.block_type.shape[3]
    ROWS: gl.constexpr = queries.block_type.shape[0]
    PAIRS_OF_KEY: gl.constexpr = (G + 1) // 2
    gdc_wait()
    gdc_launch_dependents()
    programs = gl.num_programs(0)
    attended = 0  # tiles of queries
    count = 0  # tiles of keys
    following_tile = _tile_of(columns, 0, items, PAIRS)
    for turn in range((items + programs - 1) // programs):
        pair, row, first, length, slot = following_tile
        following_tile = _tile_of(columns, turn + 1, items, PAIRS)
        if length > 0:
            kv_head = pair // PAIRS_OF_KEY
            head = kv_head * G + pair % PAIRS_OF_KEY * 2
            other = gl.minimum(head + 1, kv_head * G + G - 1)
            last = first + length
            table = tables_ptr + slot * table_stride
            number = (last + _KEYS - 1) // _KEYS
            start = (number - 1) * _KEYS
            now = _blocks_of(table, start, last, blocks, BLOCK)
            mbarrier.wait(read, (attended & 1) ^ 1)
            mbarrier.expect(asked, 2 * ROWS * D * 2)
            tma.async_copy_global_to_shared(queries, [row, head * D], asked, q_tile.slice(0, ROWS))
            tma.async_copy_global_to_shared(queries, [row, other * D], asked, q_tile.slice(ROWS, ROWS))
            attended += 1
            for _ in range(number):
                # Looked up ahead, so that nothing waits for that.
                following = _blocks_of(table, start - _KEYS, gl.where(start > 0, last, 0), blocks, BLOCK)
                _copy(keys, key_tiles, keys_ready, keys_free, count, now, start, last, kv_head)
                _copy(values, value_tiles, values_ready, values_free, count, now, start, last, kv_head)
                now = following
                start -= _KEYS
                count += 1


@gluon.jit
def _scores(q_tile, key_tiles, ready, count, LAYOUT: gl.constexpr):
    """The product of the queries with a tile of keys, which may go on."""
    stage = count % _STAGES
    mbarrier.wait(ready.index(stage), (count // _STAGES) & 1)
    ROWS: gl.constexpr = q_tile.shape[0]
    D: gl.constexpr = q_tile.shape[1]
    keys = key_tiles.index(stage).reshape([_KEYS, D])
    zeros = gl.zeros([ROWS, _KEYS], gl.float32, LAYOUT)
    return warpgroup_mma(q_tile, keys.permute((1, 0)), zeros, is_async=True, use_acc=False)


@gluon.jit
def _add(p, value_tiles, ready, count, acc):
    """acc + p @ values, which may go on."""
    stage = count % _STAGES
    mbarrier.wait(ready.index(stage), (count // _STAGES) & 1)
    D: gl.constexpr = acc.shape[1]
    values = value_tiles.index(stage).reshape([_KEYS, D])
    return warpgroup_mma(p, values, acc, is_async=True)


@gluon.jit
def _seen(scores, start, first, last, BLOCK: gl.constexpr):
    """Those of keys that a query sees; the last block's tokens stand at its end."""
    LAYOUT: gl.constexpr = scores.type.layout
    queries = first + gl.arange(0, scores.shape[0], gl.SliceLayout(1, LAYOUT))
    positions = start + gl.arange(0, _KEYS, gl.SliceLayout(0, LAYOUT))
    begin = (last - 1) // BLOCK * BLOCK
    moved = begin + BLOCK - last
    real = gl.where(positions >= begin, positions - moved, positions)
    is_key = ((positions < begin) | (positions >= begin + moved)) & (real < last)
    return gl.where(is_key[None, :] & (real[None, :] <= queries[:, None]), scores, float("-inf"))


@gluon.jit
def _weigh(scores, scale, most, total, dtype: gl.constexpr, OPERAND: gl.constexpr):
    """The weights of a tile's values, and what the sums before it are multiplied with."""
    larger = gl.maximum(most, gl.max(scores, 1) * scale)
    # The last keys come first: a query that sees none of them has no score that others could be compared with.
    ceiling = gl.where(larger == float("-inf"), 0.0, larger)
    p = gl.exp2(scores * scale - ceiling[:, None])
    alpha = gl.exp2(most - ceiling)
    total = total * alpha + gl.sum(p, 1)
    return gl.convert_layout(p.to(dtype), OPERAND), alpha, larger, total


@gluon.jit
def _store(acc, out_ptr, row, length, head, H: gl.constexpr, dtype: gl.constexpr):
    """Write a head's first `length` rows."""
    ROWS: gl.constexpr = acc.shape[0]
    D: gl.constexpr = acc.shape[1]
    FLAT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [_WARPS, 1], [1, 0])
    y = gl.convert_layout(acc.to(dtype), FLAT)
    m = gl.arange(0, ROWS, gl.SliceLayout(1, FLAT))
    dims = gl.arange(0, D, gl.SliceLayout(0, FLAT))
    offsets = (row + m).to(gl.int64)[:, None] * (H * D) + (head * D + dims)[None, :]
    gl.store(out_ptr + offsets, y, mask=(m < length)[:, None] & (dims >= 0)[None, :])


@gluon.jit
def _attend(
    q_tile,
    tiles,
    barriers,
    columns,
    items,
    out_ptr,
    scale,
    H: gl.constexpr,
    G: gl.constexpr,
    PAIRS: gl.constexpr,
    BLOCK: gl.constexpr,
    NTH: gl.constexpr,
):
    """The work of the four warps of the `NTH` head of a pair."""
    asked, read, keys_ready, keys_free, values_ready, values_free = barriers
    key_tiles, value_tiles = tiles
    ROWS: gl.constexpr = q_tile.shape[0]
    D: gl.constexpr = q_tile.shape[1]
    PAIRS_OF_KEY: gl.constexpr = (G + 1) // 2
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [_WARPS, 1], [16, _KEYS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [_WARPS, 1], [16, D, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    dtype: gl.constexpr = q_tile.dtype
    gdc_wait()
    programs = gl.num_programs(0)
    attended = 0  # tiles of queries
    end = 0  # tiles of keys
    following_tile = _tile_of(columns, 0, items, PAIRS)
    for turn in range((items + programs - 1) // programs):
        pair, row, first, length, _ = following_tile
        following_tile = _tile_of(columns, turn + 1, items, PAIRS)
        if length > 0:
            last = first + length
            number = (last + _KEYS - 1) // _KEYS
            seen_by_all = (first + 1) // _KEYS  # tiles; others have keys after some query
            begin = end
            end = begin + number
            most = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
            total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SCORES))
            acc = gl.zeros([ROWS, D], gl.float32, SUMS)
            mbarrier.wait(asked, attended & 1)
            attended += 1
            scores = warpgroup_mma_wait(0, deps=(_scores(q_tile, key_tiles, keys_ready, begin, SCORES),))
            mbarrier.arrive(keys_free.index(begin % _STAGES))
            scores = _seen(scores, (number - 1) * _KEYS, first, last, BLOCK)
            p, alpha, most, total = _weigh(scores, scale, most, total, dtype, OPERAND)
            for count in range(begin + 1, end):
                scores = _scores(q_tile, key_tiles, keys_ready, count, SCORES)
                acc = _add(p, value_tiles, values_ready, count - 1, acc)
                scores, acc = warpgroup_mma_wait(1, deps=(scores, acc))
                mbarrier.arrive(keys_free.index(count % _STAGES))
                before = end - 1 - count  # tiles
                if before >= seen_by_all:
                    scores = _seen(scores, before * _KEYS, first, last, BLOCK)
                p, alpha, most, total = _weigh(scores, scale, most, total, dtype, OPERAND)
                acc = warpgroup_mma_wait(0, deps=(acc,))
                mbarrier.arrive(values_free.index((count - 1) % _STAGES))
                acc *= gl.convert_layout(alpha, gl.SliceLayout(1, SUMS))[:, None]
            mbarrier.arrive(read)
            acc = warpgroup_mma_wait(0, deps=(_add(p, value_tiles, values_ready, end - 1, acc),))
            mbarrier.arrive(values_free.index((end - 1) % _STAGES))
            acc /= gl.convert_layout(total, gl.SliceLayout(1, SUMS))[:, None]
            nth = pair % PAIRS_OF_KEY * 2 + NTH
            # Of an odd number of queries of a key, the last has nobody beside it.
            rows = gl.where(nth < G, length, 0)
            _store(acc, out_ptr, row, rows, pair // PAIRS_OF_KEY * G + nth, H, dtype)


@gluon.jit(do_not_specialize=["table_stride", "blocks", "items"])
def _stream_prefill(
    queries,  # [tokens, ...]: rotated query heads stand first in a row
    keys,  # [blocks, HK, BLOCK, D]
    values,
    out_ptr,  # [tokens, H D]
    tile_rows_ptr,  # i64[tiles]: of `PrefillTiles`
    tile_positions_ptr,
    tile_lengths_ptr,
    tile_slots_ptr,
    tables_ptr,  # i32[slots, blocks]
    scale,  # of scores, to the base of 2
    table_stride,
    blocks,  # that there are
    items,  # tiles times pairs of heads
    H: gl.constexpr,
    G: gl.constexpr,
):
    PAIRS: gl.constexpr = H // G * ((G + 1) // 2)
    ROWS: gl.constexpr = queries.block_type.shape[0]
    BLOCK: gl.constexpr = keys.block_type.shape[2]
    D: gl.constexpr = keys.block_type.shape[3]
    q_tile = gl.allocate_shared_memory(queries.dtype, [2 * ROWS, D], queries.layout)
    key_tiles = gl.allocate_shared_memory(keys.dtype, [_STAGES, 1, 1, _KEYS, D], keys.layout)
    value_tiles = gl.allocate_shared_memory(keys.dtype, [_STAGES, 1, 1, _KEYS, D], values.layout)
    tiles = (key_tiles, value_tiles)
    asked = make_barriers(1, 1).index(0)
    read = make_barriers(1, 2).index(0)
    barriers = (
        asked,
        read,
        make_barriers(_STAGES, 1),
        make_barriers(_STAGES, 2),
        make_barriers(_STAGES, 1),
        make_barriers(_STAGES, 2),
    )
    columns = (tile_rows_ptr, tile_positions_ptr, tile_lengths_ptr, tile_slots_ptr)
    upper = q_tile.slice(0, ROWS)
    lower = q_tile.slice(ROWS, ROWS)
    tensors = (queries, keys, values)
    tables = (tables_ptr, table_stride, blocks)
    gl.warp_specialize(
        [
            (_attend, (upper, tiles, barriers, columns, items, out_ptr, scale, H, G, PAIRS, BLOCK, 0)),
            (_attend, (lower, tiles, barriers, columns, items, out_ptr, scale, H, G, PAIRS, BLOCK, 1)),
            (_ask, (q_tile, tiles, barriers, tensors, columns, tables, items, G, PAIRS)),
        ],
        [_WARPS, 1],
        [_REGISTERS_TO_ATTEND, _REGISTERS_TO_ASK],
    )


def can_stream_prefill(device: torch.device, block_size: int, group: int, head_dim: int, item_bytes: int) -> bool:
    """Return whether `stream_prefill` can attend to what is cached so: on a Hopper."""
    if device.type != "cuda" or INTERPRETED or torch.cuda.get_device_capability(device) != _HOPPER:
        return False
    return group > 1 and head_dim == _HEAD_DIM and block_size == _BLOCK and item_bytes == 2


def stream_prefill(
    qkv: Tensor, tiles: PrefillTiles, block_tables: Tensor, keys: Tensor, values: Tensor, out: Tensor, scale: float
) -> None:
    """As `prefill_attention` of a kind that sees all, in 16 bits (Shah et al., FlashAttention-3, 2024)."""
    kv_heads, head_dim = keys.shape[2:]
    heads = out.shape[1] // head_dim
    group = heads // kv_heads
    items = len(tiles) * kv_heads * triton.cdiv(group, 2)
    _stream_prefill[(min(items, multiprocessors(qkv.device, 0)),)](
        _tiled(qkv, [QUERY_TILE, head_dim]),
        _tiled(keys.transpose(1, 2), [1, 1, _BLOCK, head_dim]),
        _tiled(values.transpose(1, 2), [1, 1, _BLOCK, head_dim]),
        out,
        tiles.rows,
        tiles.positions,
        tiles.lengths,
        tiles.slots,
        block_tables,
        scale * _LOG2E,
        block_tables.stride(0),
        len(keys),
        items,
        H=heads,
        G=group,
        **options(warps=_WARPS.value, dependent=True, registers=_REGISTERS),
    )


def _tiled(tensor: Tensor, block: list[int]) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(tensor, block, gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16))
