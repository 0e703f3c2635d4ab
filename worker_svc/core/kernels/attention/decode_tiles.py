"""The tiles of a program of decode attention: it begins with the new token, then takes what is past tile by tile."""

import triton
import triton.language as tl

from worker_svc.core.kernels.attention.head_dims import kept, load, store, tile_dims
from worker_svc.core.kernels.linear.norm import row_scale

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def capped(scores, SOFTCAP: tl.constexpr):
    """SOFTCAP * tanh(scores / SOFTCAP), as long as it is not 0: none."""
    if SOFTCAP > 0:
        # tanh(x) is 2 sigmoid(2 x) - 1, of which no term is too large for any x.
        scores = SOFTCAP * (2.0 * tl.sigmoid(scores * (2.0 / SOFTCAP)) - 1.0)
    return scores


@triton.jit
def tempered(scale, positions, FLOOR_SCALE: tl.constexpr, ATTN_SCALE: tl.constexpr, FIRST: tl.constexpr):
    """The scale of queries at `positions`, counted from FIRST: more of it the later they come. FLOOR_SCALE 0: alike."""
    if FLOOR_SCALE > 0:
        scale *= 1.0 + ATTN_SCALE * tl.log(1.0 + ((positions + FIRST) // FLOOR_SCALE).to(tl.float32))
    return scale


@triton.jit
def load_sinks(pointers, is_head):
    """Scores, to the base of 2, that take part in a softmax and have no value; none where there is no head."""
    return tl.load(pointers, mask=is_head, other=float("-inf")).to(tl.float32) * _LOG2E


@triton.jit
def attend_tile(a1, a2, keys_1, keys_2, v, is_past, most, total, acc, SOFTCAP: tl.constexpr):
    """One tile of keys and values more: the running maximum, sum of exponentials and weighted values."""
    scores = tl.dot(a1, keys_1.to(a1.dtype))
    scores = tl.dot(a2, keys_2.to(a2.dtype), scores)
    scores = capped(scores, SOFTCAP)
    scores = tl.where(is_past[None, :], scores, float("-inf"))
    larger = tl.maximum(most, tl.max(scores, 1))
    p = tl.exp2(scores - larger[:, None])
    alpha = tl.exp2(most - larger)
    total = total * alpha + tl.sum(p, 1)
    acc = tl.dot(p.to(a1.dtype), v.to(a1.dtype), acc * alpha[:, None])
    return larger, total, acc


@triton.jit
def constants(rotary_ptr, query_norm_ptr, key_norm_ptr, past, D: tl.constexpr, NORM: tl.constexpr):
    """Inputs that do not depend on the kernel ahead, in halves [D / 2]: cosines and sines, and the norms' weights."""
    HALF: tl.constexpr = D // 2
    half = tl.arange(0, tile_dims(HALF))
    cos = load(rotary_ptr + past * D + half, half, HALF)
    sin = load(rotary_ptr + past * D + HALF + half, half, HALF)
    query_norm_1, query_norm_2, key_norm_1, key_norm_2 = cos, sin, cos, sin
    if NORM:
        query_norm_1 = load(query_norm_ptr + half, half, HALF).to(tl.float32)
        query_norm_2 = load(query_norm_ptr + HALF + half, half, HALF).to(tl.float32)
        key_norm_1 = load(key_norm_ptr + half, half, HALF).to(tl.float32)
        key_norm_2 = load(key_norm_ptr + HALF + half, half, HALF).to(tl.float32)
    return cos, sin, query_norm_1, query_norm_2, key_norm_1, key_norm_2


@triton.jit
def begin(
    heads,  # the sequence's row of qkv
    hidden_row,  # the sequence's row of hidden states
    cos,
    sin,
    query_norm_1,
    query_norm_2,
    key_norm_1,
    key_norm_2,
    block,  # of the new token
    keys_ptr,
    values_ptr,
    eps,
    hidden_eps,
    scale,
    key_scale,
    value_scale,
    past,
    kv_head,
    first_query,  # head
    queries,  # that the program has, from that on
    is_last,  # this part of the context ends with the new token
    block_stride,
    token_stride,
    head_stride,
    sinks_ptr,
    H: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    GP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NORM: tl.constexpr,
    HIDDEN: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
):
    """The rotated queries in two halves [GP, D / 2], and what `attend_tile` goes on from: the new token's attention,
    whose key and value are written to the cache, and that of the sinks, or none.
    """
    HALF: tl.constexpr = D // 2
    half = tl.arange(0, tile_dims(HALF))
    dims = tl.arange(0, tile_dims(D))
    group = tl.arange(0, GP)[:, None]
    q = heads + (first_query + group) * D + half[None, :]
    q1 = load(q, half[None, :], HALF, group < queries).to(tl.float32)
    q2 = load(q + HALF, half[None, :], HALF, group < queries).to(tl.float32)
    # Asked for with the queries: after them they would be waited for once more.
    key = heads + (H + kv_head) * D + half
    new_key_1 = load(key, half, HALF, (half >= 0) & is_last).to(tl.float32)
    new_key_2 = load(key + HALF, half, HALF, (half >= 0) & is_last).to(tl.float32)
    new_value = load(heads + (H + HK + kv_head) * D + dims, dims, D, (dims >= 0) & is_last)
    if HIDDEN > 0:
        from_hidden = row_scale(hidden_row, hidden_eps, HIDDEN)
        q1 *= from_hidden
        q2 *= from_hidden
    if NORM:
        q_scale = 1.0 / tl.sqrt((tl.sum(q1 * q1, 1) + tl.sum(q2 * q2, 1)) / D + eps)
        q1 = q1 * q_scale[:, None] * query_norm_1[None, :]
        q2 = q2 * q_scale[:, None] * query_norm_2[None, :]
    a1 = (q1 * cos[None, :] - q2 * sin[None, :]) * scale
    a2 = (q2 * cos[None, :] + q1 * sin[None, :]) * scale
    most = tl.full((GP,), float("-inf"), tl.float32)
    total = tl.zeros((GP,), tl.float32)
    acc = tl.zeros((GP, tile_dims(D)), tl.float32)
    if is_last:
        k1, k2, v = new_key_1, new_key_2, new_value.to(tl.float32)
        if HIDDEN > 0:
            k1 *= from_hidden
            k2 *= from_hidden
            v *= from_hidden
        if NORM:
            k_scale = 1.0 / tl.sqrt((tl.sum(k1 * k1) + tl.sum(k2 * k2)) / D + eps)
            k1 = k1 * k_scale * key_norm_1
            k2 = k2 * k_scale * key_norm_2
        b1 = kept(k1 * cos - k2 * sin, keys_ptr, key_scale)
        b2 = kept(k2 * cos + k1 * sin, keys_ptr, key_scale)
        v = kept(v, values_ptr, value_scale)
        offset = block.to(tl.int64) * block_stride + (past % BLOCK_SIZE) * token_stride + kv_head * head_stride
        store(keys_ptr + offset + half, b1, half, HALF)
        store(keys_ptr + offset + HALF + half, b2, half, HALF)
        store(values_ptr + offset + dims, v, dims, D)
        most = tl.sum(a1 * b1.to(tl.float32)[None, :], 1) + tl.sum(a2 * b2.to(tl.float32)[None, :], 1)
        most = capped(most, SOFTCAP)
        total = tl.full((GP,), 1.0, tl.float32)
        acc += v.to(tl.float32)[None, :]
        if SINKS:
            query = tl.arange(0, GP)
            sinks = load_sinks(sinks_ptr + first_query + query, query < queries)
            larger = tl.maximum(most, sinks)
            alpha = tl.exp2(most - larger)
            total = alpha + tl.exp2(sinks - larger)
            acc *= alpha[:, None]
            most = larger
    return a1.to(heads.dtype.element_ty), a2.to(heads.dtype.element_ty), most, total, acc
