"""Rotary embedding of many tokens, with the norms before it and the write to the cache after it."""

import triton
import triton.language as tl
from torch import Tensor

from worker_svc.core.kernels.attention.head_dims import aligned, kept, load, store, tile_dims
from worker_svc.core.kernels.launch import has_dependent_launch, options, release, wait
from worker_svc.core.kernels.linear.norm import row_scale
from worker_svc.core.kernels.linear.unscaled import Unscaled


@triton.jit
def head_scales(left, right, eps, D: tl.constexpr):
    """1 / rms [heads, 1] of some heads, of which both halves are [heads, D / 2]."""
    return (1.0 / tl.sqrt((tl.sum(left * left, 1) + tl.sum(right * right, 1)) / D + eps))[:, None]


@triton.jit
def rotate(left, right, cos, sin):
    """Both halves [heads, D / 2] of some heads, turned by cosines and sines [1, D / 2]."""
    return left * cos - right * sin, right * cos + left * sin


@triton.jit
def _turn(left, right, norm_ptr, cos, sin, eps, D: tl.constexpr, NORM: tl.constexpr):
    """Both halves [heads, D / 2] of some heads, normalised and rotated."""
    if NORM:
        HALF: tl.constexpr = D // 2
        half = tl.arange(0, tile_dims(HALF))
        scales = head_scales(left, right, eps, D)
        left = left * scales * load(norm_ptr + half, half, HALF)[None, :].to(tl.float32)
        right = right * scales * load(norm_ptr + HALF + half, half, HALF)[None, :].to(tl.float32)
    return rotate(left, right, cos, sin)


# Not compiled again for numbers that divide by 16: steps that are no graphs have any.
@triton.jit(do_not_specialize=["first"])
def _rope_write(
    qkv_ptr,  # [tokens, (H + 2 HK) D]
    query_norm_ptr,  # [D]
    key_norm_ptr,  # [D]
    rotary_ptr,  # f32[positions, D]: cosines, then sines
    positions_ptr,  # i64[tokens]
    slot_mapping_ptr,  # i64[tokens]: block * BLOCK_SIZE + offset
    keys_ptr,
    values_ptr,
    hidden_ptr,  # [tokens, hidden_size]: rows of qkv are multiplied by 1 / rms of these
    eps,
    hidden_eps,
    hidden_size,  # 0: they are scaled already
    first,  # row
    num_scaled_ptr,  # i64[1]: rows, the first, whose queries are multiplied by `scale`
    scale,
    key_scale,  # of keys that are kept as 8-bit floats, as the next
    value_scale,
    block_stride,
    token_stride,
    head_stride,
    H: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,  # power of two from H
    KV_HEADS: tl.constexpr,  # power of two from HK
    BLOCK_SIZE: tl.constexpr,
    NORM: tl.constexpr,
    SCALES: tl.constexpr,  # whether there are such rows
    DEPENDENT: tl.constexpr,
):
    """One program a token, all heads; everything is read before anything is written, so that it is read at once."""
    row = (first + tl.program_id(0)).to(tl.int64)
    HALF: tl.constexpr = D // 2
    token_stride, head_stride = aligned(token_stride, D), aligned(head_stride, D)
    half = tl.arange(0, tile_dims(HALF))[None, :]
    dims = tl.arange(0, tile_dims(D))[None, :]
    head = tl.arange(0, HEADS)[:, None]
    kv_head = tl.arange(0, KV_HEADS)[:, None]
    queries = qkv_ptr + row * ((H + 2 * HK) * D) + head * D + half
    keys = qkv_ptr + row * ((H + 2 * HK) * D) + (H + kv_head) * D + half
    values = qkv_ptr + row * ((H + 2 * HK) * D) + (H + HK + kv_head) * D + dims
    position = tl.load(positions_ptr + row)
    kv_slot = tl.load(slot_mapping_ptr + row)
    offset = kv_slot // BLOCK_SIZE * block_stride + kv_slot % BLOCK_SIZE * token_stride + kv_head * head_stride
    cos = load(rotary_ptr + position * D + half, half, HALF)
    sin = load(rotary_ptr + position * D + HALF + half, half, HALF)
    wait(DEPENDENT)
    release(DEPENDENT)
    q1 = load(queries, half, HALF, head < H).to(tl.float32)
    q2 = load(queries + HALF, half, HALF, head < H).to(tl.float32)
    k1 = load(keys, half, HALF, kv_head < HK).to(tl.float32)
    k2 = load(keys + HALF, half, HALF, kv_head < HK).to(tl.float32)
    v = load(values, dims, D, kv_head < HK).to(tl.float32)
    from_hidden = row_scale(hidden_ptr + row * hidden_size, hidden_eps, hidden_size)
    q1, q2 = _turn(q1 * from_hidden, q2 * from_hidden, query_norm_ptr, cos, sin, eps, D, NORM)
    k1, k2 = _turn(k1 * from_hidden, k2 * from_hidden, key_norm_ptr, cos, sin, eps, D, NORM)
    of_query = 1.0
    if SCALES:
        of_query = tl.where(row < tl.load(num_scaled_ptr), scale, 1.0)
    dtype = qkv_ptr.dtype.element_ty
    store(queries, (q1 * of_query).to(dtype), half, HALF, head < H)
    store(queries + HALF, (q2 * of_query).to(dtype), half, HALF, head < H)
    store(keys_ptr + offset + half, kept(k1, keys_ptr, key_scale), half, HALF, kv_head < HK)
    store(keys_ptr + offset + HALF + half, kept(k2, keys_ptr, key_scale), half, HALF, kv_head < HK)
    store(values_ptr + offset + dims, kept(v * from_hidden, values_ptr, value_scale), dims, D, kv_head < HK)


def rope_write(
    qkv: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    rotary: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    keys: Tensor,
    values: Tensor,
    unscaled: Unscaled | None = None,
    *,
    first: int = 0,
    num_scaled: Tensor | None = None,
    scale: float = 1.0,
    scales: tuple[float, float] = (1.0, 1.0),
) -> None:
    """Normalise and rotate the queries of the rows from `first` on in place; their keys, treated alike, and values go
    to the cache. Queries of the first `num_scaled` i64[1] rows are multiplied by `scale`, too.

    qkv [tokens, (num_heads + 2 * num_kv_heads) * head_dim], norms each [head_dim], rotary f32[positions, head_dim],
    positions and slot_mapping i64[tokens], keys and values [num_blocks, block_size, num_kv_heads, head_dim];
    `unscaled`: of the rows of qkv; `scales`: of keys and values that are kept as 8-bit floats.
    """
    _, block_size, num_kv_heads, head_dim = keys.shape
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    query_norm, key_norm = norms if norms is not None else (qkv, qkv)
    dependent = has_dependent_launch(qkv.device)
    _rope_write[(len(qkv) - first,)](
        qkv,
        query_norm,
        key_norm,
        rotary,
        positions,
        slot_mapping,
        keys,
        values,
        unscaled.hidden if unscaled is not None else qkv,
        eps,
        unscaled.eps if unscaled is not None else 0.0,
        unscaled.hidden.shape[1] if unscaled is not None else 0,
        first,
        num_scaled if num_scaled is not None else positions,
        scale,
        *scales,
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        H=num_heads,
        HK=num_kv_heads,
        D=head_dim,
        HEADS=triton.next_power_of_2(num_heads),
        KV_HEADS=triton.next_power_of_2(num_kv_heads),
        BLOCK_SIZE=block_size,
        NORM=norms is not None,
        SCALES=num_scaled is not None,
        DEPENDENT=dependent,
        **options(warps=4, dependent=dependent),
    )
