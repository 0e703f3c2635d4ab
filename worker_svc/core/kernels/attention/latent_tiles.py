"""Multi-head latent attention (DeepSeek-V2, 2024), absorbed, over a paged cache: one head that is key and value of all.

That head is two halves, each of rotated dimensions and then of latent ones; the halves turn against each other. Queries
stand likewise, and what they attend to are the latent dimensions. Rows of a tile are heads of one token or of several
that follow each other, which share each tile of the cache: it is read once, as keys and as values.
"""

import triton
import triton.language as tl

from worker_svc.core.kernels.attention.head_dims import load, store, tile_dims
from worker_svc.core.kernels.attention.rope import rotate
from worker_svc.core.kernels.launch import release, wait

LEAST_DIMS = 16  # of a matrix product's operand


@triton.constexpr_function
def padded(dims):
    """Of a part of a half, as many dimensions as a tile of it has."""
    return max(LEAST_DIMS, triton.next_power_of_2(dims))


@triton.jit
def _splits(context, most, SPLIT_T: tl.constexpr, BLOCK_T: tl.constexpr):
    """The number of splits that a context is cut into, and of tokens that each but the last has, in whole tiles: where
    so many as are wanted would leave some empty, there are fewer.
    """
    wanted = tl.minimum(most, (context + SPLIT_T - 1) // SPLIT_T)
    length = (context + wanted * BLOCK_T - 1) // (wanted * BLOCK_T) * BLOCK_T
    return (context + length - 1) // length, length


# Not compiled again for numbers that divide by 16: steps that are no graphs have any.
@triton.jit(do_not_specialize=["table_stride"])
def write_latents(
    heads_ptr,  # [tokens, (H + 1) D]: the last head is the key
    rotary_ptr,  # f32[positions, D]: cosines, then sines
    rows_ptr,  # DECODE: i64[sequences], each one's row of heads
    slots_ptr,  # DECODE: i64[sequences], each one's row of the block tables
    positions_ptr,  # i64[tokens]; DECODE: of sequences, tokens with the new one
    slot_mapping_ptr,  # i64[tokens]: block * BLOCK_SIZE + offset
    tables_ptr,  # DECODE: i32[slots, blocks]
    cached_ptr,
    table_stride,
    block_stride,
    token_stride,
    H: tl.constexpr,
    RANK: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DECODE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program a token."""
    D: tl.constexpr = RANK + ROTATED
    HALF: tl.constexpr = D // 2
    number = tl.program_id(0)
    if DECODE:
        row = tl.load(rows_ptr + number)
        position = tl.load(positions_ptr + number) - 1
        table = tables_ptr + tl.load(slots_ptr + number) * table_stride
        block = tl.load(table + position // BLOCK_SIZE).to(tl.int64)
        offset = position % BLOCK_SIZE
    else:
        row = number.to(tl.int64)
        position = tl.load(positions_ptr + row)
        kv_slot = tl.load(slot_mapping_ptr + row)
        block, offset = kv_slot // BLOCK_SIZE, kv_slot % BLOCK_SIZE
    half = tl.arange(0, tile_dims(HALF))
    cos = load(rotary_ptr + position * D + half, half, HALF)
    sin = load(rotary_ptr + position * D + HALF + half, half, HALF)
    wait(DEPENDENT)
    release(DEPENDENT)
    key = heads_ptr + row * ((H + 1) * D) + H * D + half
    left, right = load(key, half, HALF).to(tl.float32), load(key + HALF, half, HALF).to(tl.float32)
    left, right = rotate(left, right, cos, sin)
    cell = cached_ptr + block * block_stride + offset * token_stride + half
    store(cell, left.to(cached_ptr.dtype.element_ty), half, HALF)
    store(cell + HALF, right.to(cached_ptr.dtype.element_ty), half, HALF)


@triton.jit
def _load_cached(cells, is_known, RANK: tl.constexpr, ROTATED: tl.constexpr):
    """A tile of what is at `cells` [BLOCK_T, 1]: of each half the rotated dimensions, then of each the latent ones;
    zeros where `is_known` [BLOCK_T, 1], if it is given, is false.
    """
    PAIRS: tl.constexpr = ROTATED // 2
    LATENT: tl.constexpr = RANK // 2
    pair = tl.arange(0, padded(PAIRS))[None, :]
    dims = tl.arange(0, padded(LATENT))[None, :]
    left, right = cells, cells + PAIRS + LATENT
    return (
        load(left + pair, pair, PAIRS, is_known),
        load(right + pair, pair, PAIRS, is_known),
        load(left + PAIRS + dims, dims, LATENT, is_known),
        load(right + PAIRS + dims, dims, LATENT, is_known),
    )


@triton.jit
def _scores(a1, a2, q1, q2, k1, k2, c1, c2):
    """Products [BLOCK_M, BLOCK_T] of rotated (a, k) and latent dimensions (q, c)."""
    scores = tl.dot(q1, tl.trans(c1))
    scores = tl.dot(q2, tl.trans(c2), scores)
    scores = tl.dot(a1, tl.trans(k1), scores)
    return tl.dot(a2, tl.trans(k2), scores)


@triton.jit
def _add_tile(scores, c1, c2, most, total, acc1, acc2):
    """One tile more: the running maximum, sum of exponentials and weighted latents, in halves."""
    larger = tl.maximum(most, tl.max(scores, 1))
    p = tl.exp2(scores - larger[:, None])
    alpha = tl.exp2(most - larger)
    total = total * alpha + tl.sum(p, 1)
    p = p.to(c1.dtype)
    acc1 = tl.dot(p, c1, acc1 * alpha[:, None])
    acc2 = tl.dot(p, c2, acc2 * alpha[:, None])
    return larger, total, acc1, acc2


@triton.jit(do_not_specialize=["table_stride"])
def attend_latents(
    heads_ptr,  # [tokens, (H + 1) D]: query heads, not yet rotated, and the key, which is in the cache
    cached_ptr,
    rotary_ptr,  # f32[positions, D]: cosines, then sines
    out_ptr,  # [tokens, H D]
    partial_ptr,  # SPLIT: f32[sequences, splits, H, RANK]
    weight_ptr,  # SPLIT: f32[sequences, splits, H], log2 of each part's sum of exponentials
    rows_ptr,  # i64[tiles]: first row of a tile in heads and out
    positions_ptr,  # i64[tiles]: position of that row in its sequence; DECODE: one more
    lengths_ptr,  # i64[tiles]: tokens; 0: there is no such tile; DECODE: each has one
    slots_ptr,  # i64[tiles]: row of the block tables
    tables_ptr,  # i32[slots, blocks]
    scale,  # of scores, to the base of 2
    table_stride,
    block_stride,
    token_stride,
    H: tl.constexpr,
    RANK: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
    STAGES: tl.constexpr,
    SPLIT_T: tl.constexpr,
    DECODE: tl.constexpr,
    SPLIT: tl.constexpr,  # contexts may be cut, and parts are to be added up
    DEPENDENT: tl.constexpr,
):
    """One program for BLOCK_M rows of a tile, which are heads of its first token, then of the next, and a split."""
    PAIRS: tl.constexpr = ROTATED // 2
    LATENT: tl.constexpr = RANK // 2
    D: tl.constexpr = RANK + ROTATED
    begin_row = tl.program_id(0) * BLOCK_M
    split = tl.program_id(1)
    tile = tl.program_id(2)
    position = tl.load(positions_ptr + tile).to(tl.int32)
    length = 1
    if DECODE:
        position -= 1
    else:
        length = tl.load(lengths_ptr + tile).to(tl.int32)
    table = tables_ptr + tl.load(slots_ptr + tile) * table_stride
    row = tl.load(rows_ptr + tile)
    index = begin_row + tl.arange(0, BLOCK_M)
    token, head = index // H, index % H
    is_row = token[:, None] < length
    wait(DEPENDENT)
    release(DEPENDENT)
    if begin_row >= length * H:
        return
    # What the last row sees, and what all do.
    end = position + tl.minimum(length, (begin_row + BLOCK_M - 1) // H + 1)
    seen_by_all = position + begin_row // H + 1
    begin = 0
    if SPLIT:
        num_splits, split_length = _splits(end, tl.num_programs(1), SPLIT_T, BLOCK_T)
        if split >= num_splits:
            return
        begin = split * split_length
        end = tl.minimum(begin + split_length, end)
        seen_by_all = end
    pair = tl.arange(0, padded(PAIRS))[None, :]
    dims = tl.arange(0, padded(LATENT))[None, :]
    angles = rotary_ptr + (position + token)[:, None] * D + pair
    cos, sin = load(angles, pair, PAIRS, is_row), load(angles + PAIRS + LATENT, pair, PAIRS, is_row)
    queries = heads_ptr + (row + token)[:, None] * ((H + 1) * D) + head[:, None] * D
    a1, a2, q1, q2 = _load_cached(queries, is_row, RANK, ROTATED)
    a1, a2 = rotate(a1.to(tl.float32), a2.to(tl.float32), cos, sin)
    a1, a2 = a1.to(q1.dtype), a2.to(q1.dtype)
    most = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc1 = tl.zeros((BLOCK_M, padded(LATENT)), tl.float32)
    acc2 = tl.zeros((BLOCK_M, padded(LATENT)), tl.float32)
    middle = begin + (seen_by_all - begin) // BLOCK_T * BLOCK_T
    for start in tl.range(begin, middle, BLOCK_T, num_stages=STAGES):
        places = start + tl.arange(0, BLOCK_T)
        blocks = tl.load(table + places // BLOCK_SIZE).to(tl.int64)
        cells = cached_ptr + (blocks * block_stride + (places % BLOCK_SIZE) * token_stride)[:, None]
        k1, k2, c1, c2 = _load_cached(cells, None, RANK, ROTATED)
        scores = _scores(a1, a2, q1, q2, k1, k2, c1, c2) * scale
        most, total, acc1, acc2 = _add_tile(scores, c1, c2, most, total, acc1, acc2)
    for start in tl.range(middle, end, BLOCK_T, num_stages=1):
        places = start + tl.arange(0, BLOCK_T)
        is_known = places < end
        blocks = tl.load(table + places // BLOCK_SIZE, mask=is_known, other=0).to(tl.int64)
        cells = cached_ptr + (blocks * block_stride + (places % BLOCK_SIZE) * token_stride)[:, None]
        k1, k2, c1, c2 = _load_cached(cells, is_known[:, None], RANK, ROTATED)
        scores = _scores(a1, a2, q1, q2, k1, k2, c1, c2) * scale
        # Rows after the end of a tile see what its last row sees: they are not stored, but may not divide by nothing.
        is_seen = (places[None, :] <= (position + token)[:, None]) & is_known[None, :]
        scores = tl.where(is_seen, scores, float("-inf"))
        most, total, acc1, acc2 = _add_tile(scores, c1, c2, most, total, acc1, acc2)
    acc1 = acc1 / total[:, None]
    acc2 = acc2 / total[:, None]
    if SPLIT:
        parts = (tile.to(tl.int64) * tl.num_programs(1) + split) * H + index
        store(partial_ptr + parts[:, None] * RANK + dims, acc1, dims, LATENT, is_row)
        store(partial_ptr + parts[:, None] * RANK + LATENT + dims, acc2, dims, LATENT, is_row)
        tl.store(weight_ptr + parts, most + tl.log2(total), mask=token < length)
    else:
        outs = out_ptr + (row + token)[:, None] * (H * D) + head[:, None] * D + PAIRS + dims
        store(outs, acc1.to(out_ptr.dtype.element_ty), dims, LATENT, is_row)
        store(outs + PAIRS + LATENT, acc2.to(out_ptr.dtype.element_ty), dims, LATENT, is_row)


@triton.jit(do_not_specialize=["most_splits"])
def add_parts(
    partial_ptr,  # see `attend_latents`, as the next
    weight_ptr,
    out_ptr,  # [tokens, H D]
    rows_ptr,  # i64[sequences]
    contexts_ptr,  # i64[sequences]
    most_splits,
    H: tl.constexpr,
    RANK: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    SPLIT_T: tl.constexpr,
    PARTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program a head of a sequence."""
    PAIRS: tl.constexpr = ROTATED // 2
    LATENT: tl.constexpr = RANK // 2
    D: tl.constexpr = RANK + ROTATED
    head = tl.program_id(0)
    sequence = tl.program_id(1)
    context = tl.load(contexts_ptr + sequence).to(tl.int32)
    row = tl.load(rows_ptr + sequence)
    num_splits, _ = _splits(context, most_splits, SPLIT_T, BLOCK_T)
    dims = tl.arange(0, tile_dims(RANK))
    top = float("-inf")
    mass = 0.0
    attended = tl.zeros((tile_dims(RANK),), tl.float32)
    wait(DEPENDENT)
    release(DEPENDENT)
    for start in range(0, num_splits, PARTS):
        part = start + tl.arange(0, PARTS)
        is_part = part < num_splits
        places = (sequence.to(tl.int64) * most_splits + part) * H + head
        weight = tl.load(weight_ptr + places, mask=is_part, other=float("-inf"))
        partial = load(partial_ptr + places[:, None] * RANK + dims[None, :], dims[None, :], RANK, is_part[:, None])
        higher = tl.maximum(top, tl.max(weight, 0))
        kept = tl.exp2(top - higher)
        p = tl.exp2(weight - higher)
        attended = attended * kept + tl.sum(partial * p[:, None], 0)
        mass = mass * kept + tl.sum(p, 0)
        top = higher
    targets = out_ptr + row * (H * D) + head * D + PAIRS + dims + tl.where(dims < LATENT, 0, PAIRS)
    store(targets, (attended / mass).to(out_ptr.dtype.element_ty), dims, RANK)
