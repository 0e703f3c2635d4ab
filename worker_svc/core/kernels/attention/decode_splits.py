"""Attention of few sequences that advance by one token: one kernel from q, k and v to the attended heads, in which
programs read parts of one context.
"""

import triton
import triton.language as tl

from worker_svc.core.kernels.attention.decode_tiles import attend_tile, begin, constants, tempered
from worker_svc.core.kernels.attention.head_dims import aligned, load, store, tile_dims, widened
from worker_svc.core.kernels.launch import release, wait


@triton.jit
def _unseen(context, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """Tokens at the beginning of a context that its last one does not see."""
    if CHUNK > 0:
        return (context - 1) // CHUNK * CHUNK
    return tl.maximum(0, context - WINDOW) if WINDOW > 0 else 0


@triton.jit
def _added_up(
    partial_ptr,
    weight_ptr,
    base,
    num_splits,
    queries,
    D: tl.constexpr,
    GG: tl.constexpr,
    GR: tl.constexpr,
    PARTS: tl.constexpr,
):
    """The attended heads [GR, D] of a context of which all splits have ended."""
    query = tl.arange(0, GR)
    dims = tl.arange(0, tile_dims(D))[None, :]
    top = tl.full((GR,), float("-inf"), tl.float32)
    mass = tl.zeros((GR,), tl.float32)
    attended = tl.zeros((GR, tile_dims(D)), tl.float32)
    for start in range(0, num_splits, PARTS):
        # All of them are asked for before any is waited for.
        weights = ()
        partials = ()
        for part in tl.static_range(PARTS):
            is_part = start + part < num_splits
            places = (base + start + part) * GG + query
            is_place = is_part & (query < queries)
            # Rows after the queries would be -inf - -inf, which is NaN; they are never stored.
            weight = tl.load(weight_ptr + places, mask=is_place, other=0.0, cache_modifier=".cg")
            weights += (tl.where(is_part, weight, float("-inf")),)  # type: ignore[assignment]
            pointers = partial_ptr + places[:, None] * D + dims
            partials += (load(pointers, dims, D, is_place[:, None], OF_OTHERS=True),)  # type: ignore[assignment]
        higher = top
        for part in tl.static_range(PARTS):
            higher = tl.maximum(higher, weights[part])
        kept = tl.exp2(top - higher)
        mass *= kept
        attended *= kept[:, None]
        for part in tl.static_range(PARTS):
            p = tl.exp2(weights[part] - higher)
            mass += p
            attended += p[:, None] * partials[part]
        top = higher
    return attended / mass[:, None]


@triton.jit
def attend_splits(
    qkv_ptr,  # [tokens, (H + 2 HK) D]
    query_norm_ptr,  # [D]
    key_norm_ptr,  # [D]
    hidden_ptr,  # [tokens, HIDDEN]: rows of qkv are multiplied by 1 / rms of these
    rotary_ptr,  # f32[positions, D]: cosines, then sines
    rows_ptr,  # i64[sequences]: each one's row of qkv and out
    slots_ptr,  # i64[sequences]: each one's row of the block tables
    contexts_ptr,  # i64[sequences]: tokens, the new one included
    tables_ptr,  # i32[slots, blocks]
    keys_ptr,
    values_ptr,
    out_ptr,  # [tokens, H D]
    partial_ptr,  # f32[sequences, HK, GROUPS, splits, GG, D]
    weight_ptr,  # f32[sequences, HK, GROUPS, splits, GG]: log2 of each part's sum of exponentials
    sinks_ptr,  # [H]: scores that take part in each head's softmax and have no value
    done_ptr,  # i32[sequences, HK, GROUPS]: splits that have ended, 0 between launches
    eps,
    hidden_eps,
    scale,  # of scores, to the base of 2
    key_scale,  # of keys that are kept as 8-bit floats, as the next
    value_scale,
    table_stride,
    block_stride,
    token_stride,
    head_stride,
    H: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    G: tl.constexpr,  # queries of a key
    GROUPS: tl.constexpr,  # of these, each of which has programs of its own
    GG: tl.constexpr,  # queries of a group; the last may have fewer
    GR: tl.constexpr,  # power of two from GG
    GP: tl.constexpr,  # the same, but enough rows for a matrix product
    BLOCK_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    SPLIT_T: tl.constexpr,
    PARTS: tl.constexpr,  # of a context that are added up at a time
    NORM: tl.constexpr,
    HIDDEN: tl.constexpr,  # 0: they are scaled already
    STAGES: tl.constexpr,
    SPLIT: tl.constexpr,  # contexts may be cut
    AHEAD: tl.constexpr,  # past keys and values before the kernel ahead has ended: 0 none, 1 one tile, 2 all stages
    WINDOW: tl.constexpr,  # tokens that are seen, the new one included; 0: all
    CHUNK: tl.constexpr,  # contexts are cut into so many tokens, of which the new one sees its own; 0: none
    FLOOR_SCALE: tl.constexpr,  # see `tempered`, as the next two
    ATTN_SCALE: tl.constexpr,
    FIRST: tl.constexpr,
    SOFTCAP: tl.constexpr,  # of scores, to the base of 2; 0: none
    SINKS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program a group of a head's queries and split of a sequence."""
    # Neighbours are the heads of one sequence, whose keys lie side by side, then its parts: what is long begins first.
    kv_head = tl.program_id(0) // GROUPS
    # Each group writes the new key and value, which are the same.
    earlier = tl.program_id(0) % GROUPS * GG  # queries of the groups before
    first_query = kv_head * G + earlier
    queries = tl.minimum(GG, G - earlier)
    split = tl.program_id(1)
    sequence = tl.program_id(2)
    max_splits = tl.num_programs(1)
    HALF: tl.constexpr = D // 2
    token_stride, head_stride = aligned(token_stride, D), aligned(head_stride, D)
    context = tl.load(contexts_ptr + sequence).to(tl.int32)
    row = tl.load(rows_ptr + sequence)
    table = tables_ptr + tl.load(slots_ptr + sequence) * table_stride
    past = context - 1
    block = tl.load(table + past // BLOCK_SIZE)
    unseen = _unseen(context, WINDOW, CHUNK)
    scale = tempered(scale, past, FLOOR_SCALE, ATTN_SCALE, FIRST)
    seen = past - unseen
    wanted = tl.minimum(max_splits, tl.maximum(1, (seen + SPLIT_T - 1) // SPLIT_T))
    length = tl.maximum(1, (seen + wanted * BLOCK_T - 1) // (wanted * BLOCK_T)) * BLOCK_T
    # Whole tiles may need fewer splits than wanted: an empty one would be 0 / 0.
    num_splits = tl.maximum(1, (seen + length - 1) // length)
    if split < num_splits:
        first = unseen + split * length
        last = tl.minimum(first + length, past)
        half = tl.arange(0, tile_dims(HALF))
        dims = tl.arange(0, tile_dims(D))
        group = tl.arange(0, GP)
        is_row = group[:, None] < queries
        head_keys = keys_ptr + kv_head * head_stride + half[:, None]
        head_values = values_ptr + kv_head * head_stride + dims[None, :]
        tile = tl.arange(0, BLOCK_T)
        if AHEAD == 2:
            # Queries are made within the first round, so that the first tiles are on their way meanwhile; blocks are
            # looked up a round ahead, so that what is on its way is more than one tile.
            most = tl.full((GP,), float("-inf"), tl.float32)
            total = tl.zeros((GP,), tl.float32)
            acc = tl.zeros((GP, tile_dims(D)), tl.float32)
            a1 = tl.zeros((GP, tile_dims(HALF)), qkv_ptr.dtype.element_ty)
            a2 = tl.zeros((GP, tile_dims(HALF)), qkv_ptr.dtype.element_ty)
            blocks = tl.load(table + (first + tile) // BLOCK_SIZE, mask=first + tile < last, other=0)
            for start in tl.range(first, tl.maximum(last, first + 1), BLOCK_T, num_stages=STAGES):
                positions = start + tile
                is_past = positions < last
                offsets = blocks.to(tl.int64) * block_stride + (positions % BLOCK_SIZE) * token_stride
                keys_1 = load(head_keys + offsets[None, :], half[:, None], HALF, is_past[None, :])
                keys_2 = load(head_keys + HALF + offsets[None, :], half[:, None], HALF, is_past[None, :])
                v = load(head_values + offsets[:, None], dims[None, :], D, is_past[:, None])
                following = positions + BLOCK_T
                blocks = tl.load(table + following // BLOCK_SIZE, mask=following < last, other=0)
                if start == first:
                    wait(DEPENDENT)
                    release(DEPENDENT)
                    cos, sin, query_norm_1, query_norm_2, key_norm_1, key_norm_2 = constants(
                        rotary_ptr, query_norm_ptr, key_norm_ptr, past, D, NORM
                    )
                    a1, a2, most, total, acc = begin(
                        qkv_ptr + row * ((H + 2 * HK) * D),
                        hidden_ptr + row * HIDDEN,
                        cos,
                        sin,
                        query_norm_1,
                        query_norm_2,
                        key_norm_1,
                        key_norm_2,
                        block,
                        keys_ptr,
                        values_ptr,
                        eps,
                        hidden_eps,
                        scale,
                        key_scale,
                        value_scale,
                        past,
                        kv_head,
                        first_query,
                        queries,
                        split == num_splits - 1,
                        block_stride,
                        token_stride,
                        head_stride,
                        sinks_ptr,
                        H,
                        HK,
                        D,
                        GP,
                        BLOCK_SIZE,
                        NORM,
                        HIDDEN,
                        SOFTCAP,
                        SINKS,
                    )
                most, total, acc = attend_tile(a1, a2, keys_1, keys_2, v, is_past, most, total, acc, SOFTCAP)
        else:
            cos, sin, query_norm_1, query_norm_2, key_norm_1, key_norm_2 = constants(
                rotary_ptr, query_norm_ptr, key_norm_ptr, past, D, NORM
            )
            if AHEAD == 1:
                is_early = first + tile < last
                blocks = tl.load(table + (first + tile) // BLOCK_SIZE, mask=is_early, other=0)
                offsets = blocks.to(tl.int64) * block_stride + ((first + tile) % BLOCK_SIZE) * token_stride
                early_keys_1 = load(head_keys + offsets[None, :], half[:, None], HALF, is_early[None, :])
                early_keys_2 = load(head_keys + HALF + offsets[None, :], half[:, None], HALF, is_early[None, :])
                early_values = load(head_values + offsets[:, None], dims[None, :], D, is_early[:, None])
            wait(DEPENDENT)
            release(DEPENDENT)
            a1, a2, most, total, acc = begin(
                qkv_ptr + row * ((H + 2 * HK) * D),
                hidden_ptr + row * HIDDEN,
                cos,
                sin,
                query_norm_1,
                query_norm_2,
                key_norm_1,
                key_norm_2,
                block,
                keys_ptr,
                values_ptr,
                eps,
                hidden_eps,
                scale,
                key_scale,
                value_scale,
                past,
                kv_head,
                first_query,
                queries,
                split == num_splits - 1,
                block_stride,
                token_stride,
                head_stride,
                sinks_ptr,
                H,
                HK,
                D,
                GP,
                BLOCK_SIZE,
                NORM,
                HIDDEN,
                SOFTCAP,
                SINKS,
            )
            if AHEAD == 1:
                most, total, acc = attend_tile(
                    a1, a2, early_keys_1, early_keys_2, early_values, is_early, most, total, acc, SOFTCAP
                )
                first += BLOCK_T
            for start in tl.range(first, last, BLOCK_T, num_stages=STAGES):
                positions = start + tile
                is_past = positions < last
                blocks = tl.load(table + positions // BLOCK_SIZE, mask=is_past, other=0)
                offsets = blocks.to(tl.int64) * block_stride + (positions % BLOCK_SIZE) * token_stride
                keys_1 = load(head_keys + offsets[None, :], half[:, None], HALF, is_past[None, :])
                keys_2 = load(head_keys + HALF + offsets[None, :], half[:, None], HALF, is_past[None, :])
                v = load(head_values + offsets[:, None], dims[None, :], D, is_past[:, None])
                most, total, acc = attend_tile(a1, a2, keys_1, keys_2, v, is_past, most, total, acc, SOFTCAP)
        acc = widened(acc, values_ptr, value_scale)
        if not SPLIT or num_splits == 1:
            outs = out_ptr + row * (H * D) + (first_query + group[:, None]) * D + dims[None, :]
            store(outs, (acc / total[:, None]).to(out_ptr.dtype.element_ty), dims[None, :], D, is_row)
        else:
            # The split that ends last adds the parts up, so that no second kernel is needed.
            place = sequence * tl.num_programs(0) + tl.program_id(0)
            base = place * max_splits
            parts = partial_ptr + group[:, None] * D + dims[None, :]
            store(parts + (base + split) * (GG * D), acc / total[:, None], dims[None, :], D, is_row)
            tl.store(weight_ptr + (base + split) * GG + group, most + tl.log2(total), mask=group < queries)
            tl.debug_barrier()
            ended = tl.atomic_add(done_ptr + place, 1, sem="acq_rel")
            if ended == num_splits - 1:
                attended = _added_up(partial_ptr, weight_ptr, base, num_splits, queries, D, GG, GR, PARTS)
                query = tl.arange(0, GR)
                targets = out_ptr + row * (H * D) + (first_query + query[:, None]) * D + dims[None, :]
                store(targets, attended.to(out_ptr.dtype.element_ty), dims[None, :], D, query[:, None] < queries)
                tl.store(done_ptr + place, 0)
