"""Attention of many sequences that advance by one token, at about the speed at which keys and values can be read: for
Hopper.

One warp asks for tiles of all heads, context after context, ahead of those that attend to them: what begins and ends a
context keeps no memory waiting. Gluon has words for that, Triton has none; Triton's interpreter knows nothing of Gluon.
"""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from worker_svc.core.kernels.attention.decode_plan import COLUMNS
from worker_svc.core.kernels.attention.decode_stream_ends import add_up, end_context
from worker_svc.core.kernels.attention.tuning import Shares
from worker_svc.core.kernels.launch import INTERPRETED, options

_HOPPER = (9, 0)
_TOKENS = 16  # of a block of the cache, of which a tile has one or two, and rows of a matrix product's left operand
_QUERIES = gl.constexpr(8)  # of a warp, as columns of its right one
# Heads of 64 would want two or four programs a multiprocessor, of which registers let fewer run at once; they were
# never measured.
_HEAD_DIM = 128
_WARPS = (4, 8)  # that attend
# Of a multiprocessor, for keys and values that are on their way: one program of eight warps has them all, two of four.
_STAGES_BYTES = 192 * 1024
_LARGEST = gl.constexpr(65504.0)  # of fp16
# Of a thread at first, so that two programs of `finish_heads` are beside one of these, if it has eight warps; then the
# warps that attend get what the one that asks does not need.
_REGISTERS, _REGISTERS_TO_ASK = 112, gl.constexpr(40)


@gluon.jit
def _ask(keys, values, tiles, barriers, columns, plan_ptr, tables_ptr, table_stride):
    """The work of one warp."""
    key_tiles, value_tiles = tiles
    ready, free = barriers
    slots_ptr, contexts_ptr = columns[1], columns[2]
    STAGES: gl.constexpr = ready.shape[0]
    BLOCKS: gl.constexpr = key_tiles.shape[0] // STAGES
    TOKENS: gl.constexpr = key_tiles.shape[3]
    NUMBERS: gl.constexpr = BLOCKS * key_tiles.shape[2] * TOKENS * key_tiles.shape[4]
    BYTES: gl.constexpr = NUMBERS * key_tiles.dtype.primitive_bitwidth // 4
    plan = plan_ptr + gl.program_id(0) * COLUMNS
    sequence = gl.load(plan)
    start = gl.load(plan + 1)
    left = gl.load(plan + 2)
    end = gl.load(plan + 8)
    slot = gl.load(plan + 9).to(gl.int64)
    block = gl.load(plan + 11)
    count = 0
    while left > 0:
        table = tables_ptr + slot * table_stride
        number = gl.minimum(left, (end - start + BLOCKS * TOKENS - 1) // (BLOCKS * TOKENS))
        left -= number
        sequence += 1
        # Looked up ahead, so that nothing waits for that.
        next_end = gl.load(contexts_ptr + sequence, mask=left > 0, other=0).to(gl.int32)
        slot = gl.load(slots_ptr + sequence, mask=left > 0, other=0)
        next_block = gl.load(tables_ptr + slot * table_stride, mask=left > 0, other=0)
        for _ in range(number):
            stage = count % STAGES
            second = block
            if BLOCKS == 2:
                second = gl.load(table + start // TOKENS + 1, mask=start + TOKENS < end, other=0)
            following = gl.load(table + start // TOKENS + BLOCKS, mask=start + BLOCKS * TOKENS < end, other=0)
            barrier = ready.index(stage)
            mbarrier.wait(free.index(stage), ((count // STAGES) & 1) ^ 1)
            mbarrier.expect(barrier, BYTES)
            if start + BLOCKS * TOKENS >= end:
                gdc_wait()  # the kernel ahead writes the new token's key and value
            # A context's last tokens come last in their block: what is ahead of a block is zeros, and nobody reads it.
            at = [block, 0, gl.minimum(0, end - start - TOKENS), 0]
            tma.async_copy_global_to_shared(keys, at, barrier, key_tiles.index(stage * BLOCKS))
            tma.async_copy_global_to_shared(values, at, barrier, value_tiles.index(stage * BLOCKS))
            if BLOCKS == 2:
                # Of a block that is none all is ahead.
                at = [second, 0, gl.maximum(-TOKENS, gl.minimum(0, end - start - 2 * TOKENS)), 0]
                tma.async_copy_global_to_shared(keys, at, barrier, key_tiles.index(stage * BLOCKS + 1))
                tma.async_copy_global_to_shared(values, at, barrier, value_tiles.index(stage * BLOCKS + 1))
            block = following
            start += BLOCKS * TOKENS
            count += 1
        start = 0
        end = next_end
        block = next_block


@gluon.jit
def _queries(pointers, mask, tiles):
    """What `pointers` lead to, as it is multiplied with tiles: of 8 bits the fewest instructions make fp16, whose range
    is that of any query whose scores tell one token from another.
    """
    q = gl.load(pointers, mask=mask, other=0.0)
    if tiles.dtype == gl.float8e4nv:
        q = gl.maximum(gl.minimum(q.to(gl.float32), _LARGEST), -_LARGEST).to(gl.float16)
    return q


@gluon.jit
def _scores(tiles, index, q, is_token):
    """Of the tokens of a block [kv heads, tokens, queries]."""
    MMA: gl.constexpr = q.type.layout.parent
    HK: gl.constexpr = tiles.shape[2]
    TOKENS: gl.constexpr = tiles.shape[3]
    k = tiles.index(index).reshape([HK, TOKENS, tiles.shape[4]]).load(gl.DotOperandLayout(0, MMA, 2)).to(q.dtype)
    scores = mma_v2(k, q, gl.zeros([HK, TOKENS, q.shape[2]], gl.float32, MMA))
    return gl.where(is_token, scores, float("-inf"))


@gluon.jit
def _add_values(tiles, index, p, q, acc):
    """Add a block's values, each as often as its token's weight says."""
    MMA: gl.constexpr = q.type.layout.parent
    block = tiles.index(index).reshape([tiles.shape[2], tiles.shape[3], tiles.shape[4]]).permute([0, 2, 1])
    v = block.load(gl.DotOperandLayout(0, MMA, 2)).to(q.dtype)
    return mma_v2(v, gl.convert_layout(p.to(q.dtype), q.type.layout), acc)


@gluon.jit
def _attend(
    tiles,
    barriers,
    columns,
    plan_ptr,
    qkv_ptr,
    outs,
    value_scale,
    H: gl.constexpr,
    G: gl.constexpr,
    HEADS: gl.constexpr,
    QUERIES: gl.constexpr,
):
    """The work of all other warps, each for a head of keys and values and for eight of its queries."""
    key_tiles, value_tiles = tiles
    ready, free = barriers
    rows_ptr, contexts_ptr = columns[0], columns[2]
    STAGES: gl.constexpr = ready.shape[0]
    BLOCKS: gl.constexpr = key_tiles.shape[0] // STAGES
    HK: gl.constexpr = key_tiles.shape[2]
    TOKENS: gl.constexpr = key_tiles.shape[3]
    D: gl.constexpr = key_tiles.shape[4]
    # Keys and values are the left operands, of 16 rows: a warp's queries are fewer.
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [HK, 1, QUERIES // _QUERIES], [1, 16, 8])
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    FLAT: gl.constexpr = gl.SliceLayout(1, MMA)
    kv_head = gl.arange(0, HK, gl.SliceLayout(1, gl.SliceLayout(2, RIGHT)))[:, None, None]
    dims = gl.arange(0, D, gl.SliceLayout(0, gl.SliceLayout(2, RIGHT)))[None, :, None]
    group = gl.arange(0, QUERIES, gl.SliceLayout(0, gl.SliceLayout(1, RIGHT)))[None, None, :]
    queries = qkv_ptr + (kv_head * G + group) * D + dims
    is_inside = (group < G) & (kv_head >= 0) & (dims >= 0)
    tile = gl.arange(0, TOKENS, gl.SliceLayout(0, gl.SliceLayout(2, MMA)))[None, :, None]
    is_query = gl.arange(0, QUERIES, gl.SliceLayout(0, gl.SliceLayout(1, MMA)))[None, None, :] < G
    share = gl.program_id(0)
    plan = plan_ptr + share * COLUMNS
    sequence = gl.load(plan)
    start = gl.load(plan + 1)
    left = gl.load(plan + 2)
    first_place = gl.load(plan + 3)
    first_share = gl.load(plan + 4)
    last_share = gl.load(plan + 5)
    last_sequence_share = gl.load(plan + 7)
    end = gl.load(plan + 8)
    row = gl.load(plan + 10).to(gl.int64)
    place = share * 2
    gdc_wait()
    gdc_launch_dependents()
    q = _queries(queries + row * ((H + 2 * HK) * D), is_inside & (left > 0), key_tiles)
    count = 0
    while left > 0:
        number = gl.minimum(left, (end - start + BLOCKS * TOKENS - 1) // (BLOCKS * TOKENS))
        left -= number
        sequence += 1
        # Looked up ahead, so that nothing waits for that.
        next_end = gl.load(contexts_ptr + sequence, mask=left > 0, other=0).to(gl.int32)
        next_row = gl.load(rows_ptr + sequence, mask=left > 0, other=0)
        next_q = _queries(queries + next_row * ((H + 2 * HK) * D), is_inside & (left > 0), key_tiles)
        is_whole = (start == 0) & (number * BLOCKS * TOKENS >= end)
        most = gl.full([HK, QUERIES], float("-inf"), gl.float32, FLAT)
        sums = gl.zeros([HK, QUERIES], gl.float32, FLAT)
        acc = gl.zeros([HK, D, QUERIES], gl.float32, MMA)
        for _ in range(number):
            stage = count % STAGES
            mbarrier.wait(ready.index(stage), (count // STAGES) & 1)
            scores = _scores(key_tiles, stage * BLOCKS, q, tile >= start + TOKENS - end)
            larger = gl.maximum(most, gl.max(scores, 1))
            if BLOCKS == 2:
                others = _scores(key_tiles, stage * BLOCKS + 1, q, tile >= start + 2 * TOKENS - end)
                larger = gl.maximum(larger, gl.max(others, 1))
            # Columns that are no query are zeros in both products: what does not change costs no power.
            p = gl.where(is_query, gl.exp2(scores - gl.expand_dims(larger, 1)), 0.0)
            alpha = gl.exp2(most - larger)
            sums = sums * alpha + gl.sum(p, 1)
            acc = _add_values(value_tiles, stage * BLOCKS, p, q, acc * gl.expand_dims(alpha, 1))
            if BLOCKS == 2:
                p = gl.where(is_query, gl.exp2(others - gl.expand_dims(larger, 1)), 0.0)
                sums += gl.sum(p, 1)
                acc = _add_values(value_tiles, stage * BLOCKS + 1, p, q, acc)
            mbarrier.arrive(free.index(stage))
            most = larger
            start += BLOCKS * TOKENS
            count += 1
        if key_tiles.dtype == gl.float8e4nv:
            acc *= value_scale
        end_context(outs, row, place, is_whole, most, sums, acc, H, G)
        if not is_whole:
            add_up(outs, sequence - 1, row, first_place, first_share, last_share, H, D, HEADS, gl.num_warps())
        # Whatever is not the first is the share's other part, and begins there.
        place = share * 2 + 1
        first_place = place
        first_share = share
        last_share = last_sequence_share
        start = 0
        end = next_end
        row = next_row
        q = next_q


@gluon.jit(do_not_specialize=["table_stride"])
def _stream_shares(
    keys,  # [blocks, HK, TOKENS, D], by blocks
    values,
    qkv_ptr,  # [tokens, (H + 2 HK) D]: queries as `finish_heads` leaves them
    rows_ptr,  # i64[sequences]: each one's row of qkv and out
    slots_ptr,  # i64[sequences]: each one's row of the block tables
    contexts_ptr,  # i64[sequences]: tokens with KV
    plan_ptr,  # i32[shares, PLAN_COLUMNS]: of `plan_shares`
    tables_ptr,  # i32[slots, blocks]
    out_ptr,  # [tokens, H D]
    partial_ptr,  # f32[shares, 2, H, D]: of a context that others have parts of: the share's first, and another
    weight_ptr,  # f32[shares, 2, H]: log2 of each part's sum of exponentials
    done_ptr,  # i32[sequences]: parts that have ended, 0 between launches
    value_scale,  # of values that are kept as 8-bit floats
    table_stride,
    H: gl.constexpr,
    G: gl.constexpr,
    HEADS: gl.constexpr,  # power of two from H
    QUERIES: gl.constexpr,  # of a key as all its warps have them, a power of two from G
    STAGES: gl.constexpr,
    BLOCKS: gl.constexpr,  # of a tile
):
    SHAPE: gl.constexpr = keys.block_type.shape
    BLOCK: gl.constexpr = [STAGES * BLOCKS, 1, SHAPE[1], SHAPE[2], SHAPE[3]]
    tiles = (
        gl.allocate_shared_memory(keys.dtype, BLOCK, keys.layout),
        gl.allocate_shared_memory(keys.dtype, BLOCK, values.layout),
    )
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    barriers = (ready, free)
    columns = (rows_ptr, slots_ptr, contexts_ptr)
    outs = (out_ptr, partial_ptr, weight_ptr, done_ptr)
    gl.warp_specialize(
        [
            (_attend, (tiles, barriers, columns, plan_ptr, qkv_ptr, outs, value_scale, H, G, HEADS, QUERIES)),
            (_ask, (keys, values, tiles, barriers, columns, plan_ptr, tables_ptr, table_stride)),
        ],
        [1],
        [_REGISTERS_TO_ASK],
    )


def _tiled(cache: Tensor) -> TensorDescriptor:
    """Keys or values [blocks, tokens, heads, head_dim] by blocks, in which a head's tokens are neighbours."""
    by_heads = cache.transpose(1, 2)
    block = [1, *by_heads.shape[1:]]
    dtype = gl.float8e4nv if cache.dtype == torch.float8_e4m3fn else gl.bfloat16
    return TensorDescriptor.from_tensor(by_heads, block, gl.NVMMASharedLayout.get_default_for(block, dtype))


def stream_warps(
    device: torch.device, block_size: int, num_heads: int, num_kv_heads: int, head_dim: int, item_bytes: int
) -> int:
    """Return the warps with which a program of `stream_shares` attends to what is cached so, on a Hopper: each has a
    block of one head of keys, and at most eight of its queries; 0: it cannot.
    """
    if device.type != "cuda" or INTERPRETED or torch.cuda.get_device_capability(device) != _HOPPER:
        return 0
    if head_dim != _HEAD_DIM or block_size != _TOKENS or item_bytes not in (1, 2):
        return 0
    warps = num_kv_heads * triton.next_power_of_2(-(-num_heads // (num_kv_heads * _QUERIES.value)))
    return next((each for each in _WARPS if each >= warps and num_kv_heads in (1, 2, 4, 8)), 0)


def stream_shares(
    shares: Shares,
    qkv: Tensor,
    rows: tuple[Tensor, Tensor, Tensor],
    plan: Tensor,
    tables: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    scratch: tuple[Tensor, Tensor, Tensor],
    value_scale: float = 1.0,
) -> None:
    """Write the attended heads into `out`, after `finish_heads`; the warps of `shares` are those of `stream_warps`.

    `rows`: rows, slots and contexts of the sequences; `scratch`: parts, their weights, how many of them have ended;
    `value_scale`: of values that are kept as 8-bit floats.
    """
    kv_heads, head_dim = keys.shape[2:]
    heads = out.shape[1] // head_dim
    tile_bytes = 2 * shares.tokens * kv_heads * head_dim * keys.element_size()
    _stream_shares[(shares.programs,)](
        _tiled(keys),
        _tiled(values),
        qkv,
        *rows,
        plan,
        tables,
        out,
        *scratch,
        value_scale,
        tables.stride(0),
        H=heads,
        G=heads // kv_heads,
        HEADS=triton.next_power_of_2(heads),
        QUERIES=_QUERIES.value * shares.warps // kv_heads,
        STAGES=_STAGES_BYTES * shares.warps // _WARPS[-1] // tile_bytes,
        BLOCKS=shares.tokens // _TOKENS,
        **options(warps=shares.warps, dependent=True, registers=_REGISTERS),
    )
