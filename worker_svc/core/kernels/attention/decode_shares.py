"""Attention of many sequences that advance by one token, by two kernels: one that ends what a layer's product of
queries, keys and values began, one whose programs read equal shares of all contexts, as if they were one.
"""

import triton
import triton.language as tl

from worker_svc.core.kernels.attention.decode_plan import COLUMNS
from worker_svc.core.kernels.attention.head_dims import aligned, kept, load, store, tile_dims, widened
from worker_svc.core.kernels.attention.rope import head_scales, rotate
from worker_svc.core.kernels.launch import release, wait
from worker_svc.core.kernels.linear.norm import whole_row_scale


@triton.jit
def _norm_weights(norm_ptr, D: tl.constexpr, NORM: tl.constexpr):
    """Both halves [1, D / 2] of a norm's weights; of none, ones."""
    HALF: tl.constexpr = D // 2
    half = tl.arange(0, tile_dims(HALF))[None, :]
    left = tl.full((1, tile_dims(HALF)), 1.0, tl.float32)
    right = left
    if NORM:
        left = load(norm_ptr + half, half, HALF).to(tl.float32)
        right = load(norm_ptr + HALF + half, half, HALF).to(tl.float32)
    return left, right


@triton.jit
def _turn(left, right, norm_left, norm_right, cos, sin, eps, D: tl.constexpr, NORM: tl.constexpr):
    """Both halves [heads, D / 2] of some heads, normalised and rotated, by weights that have been read."""
    if NORM:
        scales = head_scales(left, right, eps, D)
        left = left * scales * norm_left
        right = right * scales * norm_right
    return rotate(left, right, cos, sin)


@triton.jit
def finish_heads(
    qkv_ptr,  # [tokens, (H + 2 HK) D]
    query_norm_ptr,  # [D]
    key_norm_ptr,  # [D]
    hidden_ptr,  # [tokens, hidden_size]: rows of qkv are multiplied by 1 / rms of these
    rotary_ptr,  # f32[positions, D]: cosines, then sines
    rows_ptr,  # i64[sequences]: each one's row of qkv
    slots_ptr,  # i64[sequences]: each one's row of the block tables
    contexts_ptr,  # i64[sequences]: tokens, the new one included
    tables_ptr,  # i32[slots, blocks]
    keys_ptr,
    values_ptr,
    eps,
    hidden_eps,
    scale,  # of queries
    key_scale,  # of keys that are kept as 8-bit floats, as the next
    value_scale,
    table_stride,
    block_stride,
    token_stride,
    head_stride,
    H: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,  # power of two from H
    BLOCK_SIZE: tl.constexpr,
    NORM: tl.constexpr,
    HIDDEN: tl.constexpr,  # hidden_size; 0: they are scaled already
    DEPENDENT: tl.constexpr,
):
    """One program a sequence: normalise, rotate and scale its queries in place, and write its new key and value to the
    cache. All that does not depend on the kernel ahead is read before it has ended, all else at once after that.
    """
    release(DEPENDENT)
    sequence = tl.program_id(0)
    HALF: tl.constexpr = D // 2
    token_stride, head_stride = aligned(token_stride, D), aligned(head_stride, D)
    # Four at a time, so that queries lie as keys do: their cosines, sines and weights are few registers, shared.
    half = tl.max_contiguous(tl.arange(0, tile_dims(HALF)), 4)[None, :]
    dims = tl.arange(0, tile_dims(D))[None, :]
    head = tl.arange(0, HEADS)[:, None]
    kv_head = tl.arange(0, HK)[:, None]
    row = tl.load(rows_ptr + sequence)
    position = tl.load(contexts_ptr + sequence) - 1
    table = tables_ptr + tl.load(slots_ptr + sequence) * table_stride
    query_norm_1, query_norm_2 = _norm_weights(query_norm_ptr, D, NORM)
    key_norm_1, key_norm_2 = _norm_weights(key_norm_ptr, D, NORM)
    block = tl.load(table + position // BLOCK_SIZE).to(tl.int64)
    cos = load(rotary_ptr + position * D + half, half, HALF)
    sin = load(rotary_ptr + position * D + HALF + half, half, HALF)
    offset = block * block_stride + position % BLOCK_SIZE * token_stride + kv_head * head_stride
    queries = qkv_ptr + row * ((H + 2 * HK) * D) + head * D + half
    keys = qkv_ptr + row * ((H + 2 * HK) * D) + (H + kv_head) * D + half
    values = qkv_ptr + row * ((H + 2 * HK) * D) + (H + HK + kv_head) * D + dims
    wait(DEPENDENT)
    q1 = load(queries, half, HALF, head < H).to(tl.float32)
    q2 = load(queries + HALF, half, HALF, head < H).to(tl.float32)
    k1 = load(keys, half, HALF).to(tl.float32)
    k2 = load(keys + HALF, half, HALF).to(tl.float32)
    v = load(values, dims, D).to(tl.float32)
    tl.debug_barrier()  # or the compiler would read these after the sum below, so as to need fewer registers
    from_hidden = whole_row_scale(hidden_ptr + row * HIDDEN, hidden_eps, HIDDEN)
    q1, q2 = _turn(q1 * from_hidden, q2 * from_hidden, query_norm_1, query_norm_2, cos, sin, eps, D, NORM)
    k1, k2 = _turn(k1 * from_hidden, k2 * from_hidden, key_norm_1, key_norm_2, cos, sin, eps, D, NORM)
    dtype = qkv_ptr.dtype.element_ty
    store(queries, (q1 * scale).to(dtype), half, HALF, head < H)
    store(queries + HALF, (q2 * scale).to(dtype), half, HALF, head < H)
    store(keys_ptr + offset + half, kept(k1, keys_ptr, key_scale), half, HALF)
    store(keys_ptr + offset + HALF + half, kept(k2, keys_ptr, key_scale), half, HALF)
    store(values_ptr + offset + dims, kept(v * from_hidden, values_ptr, value_scale), dims, D)


@triton.jit
def _blocks(table, start, end, BLOCK_SIZE: tl.constexpr, BLOCK_T: tl.constexpr):
    """Of the tokens of a tile: one, where a tile is never in more."""
    tile = tl.arange(0, 1 if BLOCK_SIZE % BLOCK_T == 0 else BLOCK_T)
    return tl.load(table + (start + tile) // BLOCK_SIZE, mask=start + tile < end, other=0)


@triton.jit
def _store(
    out_ptr,
    partial_ptr,
    weight_ptr,
    row,
    place,
    is_whole,
    most,
    sums,
    acc_1,
    acc_2,
    H: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
):
    """Write what was attended, of a whole context or as a part of it."""
    kv_head = tl.arange(0, HK)[:, None, None]
    group = tl.arange(0, GP)[None, :, None]
    heads = kv_head * G + group
    HALF: tl.constexpr = D // 2
    half = tl.arange(0, tile_dims(HALF))[None, None, :]
    is_query = tl.arange(0, GP)[None, :] < G
    sums = tl.where(is_query, sums, 1.0)
    acc_1 /= sums[:, :, None]
    acc_2 /= sums[:, :, None]
    if is_whole:
        outs = out_ptr + row * (H * D) + heads * D + half
        store(outs, acc_1.to(out_ptr.dtype.element_ty), half, HALF, group < G)
        store(outs + HALF, acc_2.to(out_ptr.dtype.element_ty), half, HALF, group < G)
    else:
        parts = partial_ptr + (place * H + heads) * D + half
        store(parts, acc_1, half, HALF, group < G)
        store(parts + HALF, acc_2, half, HALF, group < G)
        weights = weight_ptr + place * H + tl.arange(0, HK)[:, None] * G + tl.arange(0, GP)[None, :]
        tl.store(weights, most + tl.log2(sums), mask=is_query)


@triton.jit
def _look_up(contexts_ptr, slots_ptr, rows_ptr, sequence, sequences):
    """A sequence's end, slot and row, if there is one."""
    is_there = sequence < sequences
    end = tl.load(contexts_ptr + sequence, mask=is_there, other=0).to(tl.int32)
    slot = tl.load(slots_ptr + sequence, mask=is_there, other=0)
    return end, slot, tl.load(rows_ptr + sequence, mask=is_there, other=0)


@triton.jit
def _part(partial_ptr, weight_ptr, place, is_part, H: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr):
    """A part's attended heads [HEADS, D] and their weights [HEADS]; of none, weights of zero."""
    head = tl.arange(0, HEADS)
    dims = tl.arange(0, tile_dims(D))
    is_head = is_part & (head < H)
    # Rows after H would be -inf - -inf, which is NaN; they are never stored.
    weight = tl.load(weight_ptr + place * H + head, mask=is_head, other=0.0, cache_modifier=".cg")
    pointers = partial_ptr + (place * H + head[:, None]) * D + dims[None, :]
    partial = load(pointers, dims[None, :], D, is_head[:, None], OF_OTHERS=True)
    return tl.where(is_part, weight, float("-inf")), partial


@triton.jit
def _add_up(
    partial_ptr,
    weight_ptr,
    target,  # [H, D]
    first_place,
    first_share,
    last_share,
    H: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,
):
    """The parts of a context: one at `first_place` of the first share, then the first of each share; two at a time."""
    head = tl.arange(0, HEADS)[:, None]
    top, attended = _part(partial_ptr, weight_ptr, first_place, True, H, D, HEADS)
    mass = tl.full((HEADS,), 1.0, tl.float32)
    for share in range(first_share + 1, last_share + 1, 2):
        weight_1, part_1 = _part(partial_ptr, weight_ptr, share * 2, True, H, D, HEADS)
        weight_2, part_2 = _part(partial_ptr, weight_ptr, share * 2 + 2, share < last_share, H, D, HEADS)
        higher = tl.maximum(top, tl.maximum(weight_1, weight_2))
        kept, p_1, p_2 = tl.exp2(top - higher), tl.exp2(weight_1 - higher), tl.exp2(weight_2 - higher)
        attended = attended * kept[:, None] + part_1 * p_1[:, None] + part_2 * p_2[:, None]
        mass = mass * kept + p_1 + p_2
        top = higher
    dims = tl.arange(0, tile_dims(D))[None, :]
    store(target + head * D + dims, (attended / mass[:, None]).to(target.dtype.element_ty), dims, D, head < H)


@triton.jit(do_not_specialize=["sequences"])
def attend_shares(
    qkv_ptr,  # [tokens, (H + 2 HK) D]: queries as `finish_heads` leaves them
    rows_ptr,  # i64[sequences]: each one's row of qkv and out
    slots_ptr,  # i64[sequences]: each one's row of the block tables
    contexts_ptr,  # i64[sequences]: tokens with KV
    plan_ptr,  # i32[shares, PLAN_COLUMNS]: of `plan_shares`
    tables_ptr,  # i32[slots, blocks]
    keys_ptr,
    values_ptr,
    out_ptr,  # [tokens, H D]
    partial_ptr,  # f32[shares, 2, H, D]: of a context that others have parts of: the share's first, and another
    weight_ptr,  # f32[shares, 2, H]: log2 of each part's sum of exponentials
    done_ptr,  # i32[sequences]: parts that have ended, 0 between launches
    value_scale,  # of values that are kept as 8-bit floats
    sequences,
    table_stride,
    block_stride,
    token_stride,
    head_stride,
    H: tl.constexpr,
    HK: tl.constexpr,  # power of two
    D: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,  # power of two from G, and enough rows for a matrix product
    BLOCK_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    HEADS: tl.constexpr,  # power of two from H
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A program attends to the tiles of its share, a warp to a head."""
    share = tl.program_id(0)
    HALF: tl.constexpr = D // 2
    token_stride, head_stride = aligned(token_stride, D), aligned(head_stride, D)
    plan = plan_ptr + share * COLUMNS
    first_sequence = tl.load(plan)
    start = tl.load(plan + 1)
    count = tl.load(plan + 2)
    first_place = tl.load(plan + 3)
    first_share = tl.load(plan + 4)
    last_share = tl.load(plan + 5)
    last_sequence = tl.load(plan + 6)
    last_sequence_share = tl.load(plan + 7)
    if count > 0:
        sequence = first_sequence
        end, slot, row = _look_up(contexts_ptr, slots_ptr, rows_ptr, sequence, sequences)
        next_end, next_slot, next_row = _look_up(contexts_ptr, slots_ptr, rows_ptr, sequence + 1, sequences)
        table = tables_ptr + slot * table_stride
        kv_head = tl.arange(0, HK)[:, None, None]
        group = tl.arange(0, GP)[None, :, None]
        tile = tl.arange(0, BLOCK_T)
        dims = tl.arange(0, tile_dims(D))
        head_keys = keys_ptr + kv_head * head_stride + dims[None, :, None]
        half = tl.arange(0, tile_dims(HALF))
        head_values = values_ptr + kv_head * head_stride + half[None, None, :]
        most = tl.full((HK, GP), float("-inf"), tl.float32)
        sums = tl.zeros((HK, GP), tl.float32)
        acc_1 = tl.zeros((HK, GP, tile_dims(HALF)), tl.float32)
        acc_2 = tl.zeros((HK, GP, tile_dims(HALF)), tl.float32)
        q = tl.zeros((HK, GP, tile_dims(D)), qkv_ptr.dtype.element_ty)
        is_whole = start == 0
        out_row = tl.load(rows_ptr + sequence)  # not `row`: Triton takes variables that begin as one for one
        # What is on its way before the kernel ahead has ended must not be the new token's key and value.
        if (end - start + BLOCK_T - 1) // BLOCK_T <= tl.minimum(count, STAGES):
            wait(DEPENDENT)
        blocks = _blocks(table, start, end, BLOCK_SIZE, BLOCK_T)
        for number in tl.range(0, count, num_stages=STAGES):
            positions = start + tile
            is_token = positions < end
            offsets = blocks.to(tl.int64) * block_stride + (positions % BLOCK_SIZE) * token_stride
            k = load(head_keys + offsets[None, None, :], dims[None, :, None], D, is_token[None, None, :])
            v_1 = load(head_values + offsets[None, :, None], half[None, None, :], HALF, is_token[None, :, None])
            v_2 = load(head_values + HALF + offsets[None, :, None], half[None, None, :], HALF, is_token[None, :, None])
            # Blocks are looked up a round ahead, sequences one ahead, so that nothing waits for that.
            following, following_start, following_end, following_table = sequence, start + BLOCK_T, end, table
            following_row = row
            if start + BLOCK_T >= end:
                following, following_start = sequence + 1, 0
                following_end, following_row = next_end, next_row
                following_table = tables_ptr + next_slot * table_stride
                next_end, next_slot, next_row = _look_up(contexts_ptr, slots_ptr, rows_ptr, sequence + 2, sequences)
            blocks = _blocks(following_table, following_start, following_end, BLOCK_SIZE, BLOCK_T)
            if (start == 0) | (number == 0):
                wait(DEPENDENT)
                release(DEPENDENT)
                if number > 0:
                    acc_1 = widened(acc_1, values_ptr, value_scale)
                    acc_2 = widened(acc_2, values_ptr, value_scale)
                    _store(
                        out_ptr,
                        partial_ptr,
                        weight_ptr,
                        out_row,
                        share * 2,
                        is_whole,
                        most,
                        sums,
                        acc_1,
                        acc_2,
                        H,
                        HK,
                        D,
                        G,
                        GP,
                    )
                queries = qkv_ptr + row * ((H + 2 * HK) * D) + (kv_head * G + group) * D + dims[None, None, :]
                q = load(queries, dims[None, None, :], D, group < G)
                is_whole = start == 0
                out_row = row
                most = tl.full((HK, GP), float("-inf"), tl.float32)
                sums = tl.zeros((HK, GP), tl.float32)
                acc_1 = tl.zeros((HK, GP, tile_dims(HALF)), tl.float32)
                acc_2 = tl.zeros((HK, GP, tile_dims(HALF)), tl.float32)
            scores = tl.where(is_token[None, None, :], tl.dot(q, k.to(q.dtype)), float("-inf"))
            larger = tl.maximum(most, tl.max(scores, 2))
            # Rows that are no query are zeros in both products: what does not change costs no power.
            p = tl.where(group < G, tl.exp2(scores - larger[:, :, None]), 0.0)
            alpha = tl.exp2(most - larger)
            sums = sums * alpha + tl.sum(p, 2)
            weights = p.to(q.dtype)
            acc_1 = tl.dot(weights, v_1.to(q.dtype), acc_1 * alpha[:, :, None])
            acc_2 = tl.dot(weights, v_2.to(q.dtype), acc_2 * alpha[:, :, None])
            most = larger
            sequence, start, end, table, row = (
                following,
                following_start,
                following_end,
                following_table,
                following_row,
            )
        place = share * 2 + (last_sequence_share > 0).to(tl.int32)
        is_whole &= start == 0
        acc_1, acc_2 = widened(acc_1, values_ptr, value_scale), widened(acc_2, values_ptr, value_scale)
        _store(out_ptr, partial_ptr, weight_ptr, out_row, place, is_whole, most, sums, acc_1, acc_2, H, HK, D, G, GP)
        tl.debug_barrier()
        # Of what others have parts of, the program that ends last adds the parts up.
        for number in range(2):
            if number == 1:
                first_sequence, first_place = last_sequence, share * 2 + 1
                first_share, last_share = share, tl.maximum(share, last_sequence_share)
            if first_share < last_share:
                ended = tl.atomic_add(done_ptr + first_sequence, 1, sem="acq_rel")
                if ended == last_share - first_share:
                    target = out_ptr + tl.load(rows_ptr + first_sequence) * (H * D)
                    _add_up(partial_ptr, weight_ptr, target, first_place, first_share, last_share, H, D, HEADS)
                    tl.store(done_ptr + first_sequence, 0)
