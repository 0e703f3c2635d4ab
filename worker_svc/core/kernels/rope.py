"""Rotary embedding of many tokens, with the norms before it and the write to the cache behind it."""

import triton
import triton.language as tl
from torch import Tensor

from worker_svc.core.kernels.launch import options
from worker_svc.core.kernels.norm import row_scale
from worker_svc.core.operations.interface import Unscaled


@triton.jit
def _rope_write(
    qkv_ptr,  # [tokens, (H + 2 HK) D]
    query_norm_ptr,  # [D]
    key_norm_ptr,  # [D]
    rotary_ptr,  # f32[positions, D]: cosines, then sines
    rows_ptr,  # i64[n]
    positions_ptr,  # i64[tokens]
    cells_ptr,  # i64[tokens]: block * BLOCK_SIZE + offset
    keys_ptr,
    values_ptr,
    hidden_ptr,  # [tokens, hidden_size]: rows of qkv are multiplied by 1 / rms of these
    eps,
    hidden_eps,
    hidden_size,  # 0: they are scaled already
    block_stride,
    token_stride,
    head_stride,
    H: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,  # power of two from H + HK
    KV_HEADS: tl.constexpr,  # power of two from HK
    BLOCK_SIZE: tl.constexpr,
    NORM: tl.constexpr,
):
    """One program a token, all heads."""
    row = tl.load(rows_ptr + tl.program_id(0))
    HALF: tl.constexpr = D // 2
    half = tl.arange(0, HALF)
    position = tl.load(positions_ptr + row)
    cell = tl.load(cells_ptr + row)
    cell = cell // BLOCK_SIZE * block_stride + cell % BLOCK_SIZE * token_stride
    cos = tl.load(rotary_ptr + position * D + half)[None, :]
    sin = tl.load(rotary_ptr + position * D + HALF + half)[None, :]
    head = tl.arange(0, HEADS)[:, None]
    is_query = head < H
    is_key = (head >= H) & (head < H + HK)
    heads = qkv_ptr + row * ((H + 2 * HK) * D)
    left = tl.load(heads + head * D + half[None, :], mask=head < H + HK, other=0.0).to(tl.float32)
    right = tl.load(heads + head * D + HALF + half[None, :], mask=head < H + HK, other=0.0).to(tl.float32)
    from_hidden = row_scale(hidden_ptr + row * hidden_size, hidden_eps, hidden_size)
    left *= from_hidden
    right *= from_hidden
    if NORM:
        q1 = tl.load(query_norm_ptr + half)[None, :].to(tl.float32)
        q2 = tl.load(query_norm_ptr + HALF + half)[None, :].to(tl.float32)
        k1 = tl.load(key_norm_ptr + half)[None, :].to(tl.float32)
        k2 = tl.load(key_norm_ptr + HALF + half)[None, :].to(tl.float32)
        scale = 1.0 / tl.sqrt((tl.sum(left * left, 1) + tl.sum(right * right, 1)) / D + eps)
        left = left * scale[:, None] * tl.where(is_query, q1, k1)
        right = right * scale[:, None] * tl.where(is_query, q2, k2)
    x = left * cos - right * sin
    y = right * cos + left * sin
    tl.store(heads + head * D + half[None, :], x.to(qkv_ptr.dtype.element_ty), mask=is_query)
    tl.store(heads + head * D + HALF + half[None, :], y.to(qkv_ptr.dtype.element_ty), mask=is_query)
    key = keys_ptr + cell + (head - H) * head_stride + half[None, :]
    tl.store(key, x.to(keys_ptr.dtype.element_ty), mask=is_key)
    tl.store(key + HALF, y.to(keys_ptr.dtype.element_ty), mask=is_key)
    kv_head = tl.arange(0, KV_HEADS)[:, None]
    dims = tl.arange(0, D)[None, :]
    v = tl.load(heads + (H + HK + kv_head) * D + dims, mask=kv_head < HK, other=0.0)
    v = (v.to(tl.float32) * from_hidden).to(values_ptr.dtype.element_ty)
    tl.store(values_ptr + cell + kv_head * head_stride + dims, v, mask=kv_head < HK)


def rope_write(
    qkv: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    rotary: Tensor,
    rows: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    keys: Tensor,
    values: Tensor,
    unscaled: Unscaled | None = None,
) -> None:
    """Normalise and rotate the queries of `rows` in place; their keys, treated alike, and values go to the cache.

    qkv [tokens, (num_heads + 2 * num_kv_heads) * head_dim], norms each [head_dim], rotary f32[positions, head_dim],
    rows i64[n], positions and slot_mapping i64[tokens], keys and values [num_blocks, block_size, num_kv_heads,
    head_dim]; `unscaled`: of the rows of qkv.
    """
    _, block_size, num_kv_heads, head_dim = keys.shape
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    query_norm, key_norm = norms if norms is not None else (qkv, qkv)
    _rope_write[(len(rows),)](
        qkv,
        query_norm,
        key_norm,
        rotary,
        rows,
        positions,
        slot_mapping,
        keys,
        values,
        unscaled.hidden if unscaled is not None else qkv,
        eps,
        unscaled.eps if unscaled is not None else 0.0,
        unscaled.hidden.shape[1] if unscaled is not None else 0,
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        H=num_heads,
        HK=num_kv_heads,
        D=head_dim,
        HEADS=triton.next_power_of_2(num_heads + num_kv_heads),
        KV_HEADS=triton.next_power_of_2(num_kv_heads),
        BLOCK_SIZE=block_size,
        NORM=norms is not None,
        **options(warps=4),
    )
