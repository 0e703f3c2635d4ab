"""Attention of chunks of prompts over a paged context whose keys and values are all in the cache."""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from worker_svc.core.kernels.attention.decode_tiles import capped, load_sinks, tempered
from worker_svc.core.kernels.attention.head_dims import aligned, load, store, tile_dims, widened
from worker_svc.core.kernels.attention.tuning import find_prefill_tile
from worker_svc.core.kernels.launch import has_dependent_launch, options, release, wait

QUERY_TILE = 64
_LOG2E = 1.4426950408889634


@triton.jit
def _oldest_seen(position, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """The first position that the token at `position` sees."""
    if CHUNK > 0:
        return position // CHUNK * CHUNK
    return tl.maximum(0, position + 1 - WINDOW) if WINDOW > 0 else 0


@triton.jit
def _prefill_attention(
    qkv_ptr,  # [tokens, ...]: rotated query heads stand first in a row
    keys_ptr,
    values_ptr,
    out_ptr,  # [tokens, H D]
    tile_rows_ptr,  # i64[tiles]: first row of a tile in qkv and out
    tile_positions_ptr,  # i64[tiles]: position of that row in its sequence
    tile_lengths_ptr,  # i64[tiles]: rows, at most BLOCK_M; 0: there is no such tile
    tile_slots_ptr,  # i64[tiles]: row of the block tables
    tables_ptr,  # i32[slots, blocks]
    sinks_ptr,  # [H]: scores that take part in each head's softmax and have no value
    scale,  # of scores, to the base of 2
    value_scale,  # of values that are kept as 8-bit floats
    row_stride,
    table_stride,
    block_stride,
    token_stride,
    head_stride,
    H: tl.constexpr,
    D: tl.constexpr,
    G: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
    STAGES: tl.constexpr,
    WINDOW: tl.constexpr,  # tokens that a query sees, itself included; 0: all before it
    CHUNK: tl.constexpr,  # contexts are cut into so many tokens, of which a query sees its own; 0: none
    FLOOR_SCALE: tl.constexpr,  # see `tempered`, as the next two
    ATTN_SCALE: tl.constexpr,
    FIRST: tl.constexpr,
    SOFTCAP: tl.constexpr,  # of scores, to the base of 2; 0: none
    SINKS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    head = tl.program_id(0)
    tile = tl.program_id(1)
    row_stride = aligned(row_stride, D)
    token_stride, head_stride = aligned(token_stride, D), aligned(head_stride, D)
    first = tl.load(tile_positions_ptr + tile).to(tl.int32)
    length = tl.load(tile_lengths_ptr + tile).to(tl.int32)
    table = tables_ptr + tl.load(tile_slots_ptr + tile) * table_stride
    m = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, tile_dims(D))
    is_row = m[:, None] < length
    rows = tl.load(tile_rows_ptr + tile) + m
    wait(DEPENDENT)
    release(DEPENDENT)
    if length == 0:
        return
    q = load(qkv_ptr + rows[:, None] * row_stride + head * D + dims[None, :], dims[None, :], D, is_row)
    if FLOOR_SCALE > 0:
        scale = tempered(scale, first + m, FLOOR_SCALE, ATTN_SCALE, FIRST)[:, None]
    kv_head = head // G
    keys = keys_ptr + kv_head * head_stride + dims[:, None]
    values = values_ptr + kv_head * head_stride + dims[None, :]
    most = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, tile_dims(D)), tl.float32)
    if SINKS:
        most = load_sinks(sinks_ptr + head + tl.zeros((BLOCK_M,), tl.int32), m < BLOCK_M)
        total += 1.0
    last = first + length
    oldest = _oldest_seen(first, WINDOW, CHUNK)
    begin = oldest // BLOCK_T * BLOCK_T
    seen_by_all = begin if WINDOW > 0 else (first + 1) // BLOCK_T * BLOCK_T
    if CHUNK > 0:
        # Rows of two chunks, or of one that begins within a tile, do not all see the same.
        is_alike = (begin == oldest) & ((last - 1) // CHUNK * CHUNK == oldest)
        seen_by_all = tl.where(is_alike, seen_by_all, begin)
    for start in tl.range(begin, seen_by_all, BLOCK_T, num_stages=STAGES):
        positions = start + tl.arange(0, BLOCK_T)
        blocks = tl.load(table + positions // BLOCK_SIZE).to(tl.int64)
        offsets = blocks * block_stride + (positions % BLOCK_SIZE) * token_stride
        k = load(keys + offsets[None, :], dims[:, None], D)
        scores = capped(tl.dot(q, k.to(q.dtype)) * scale, SOFTCAP)
        larger = tl.maximum(most, tl.max(scores, 1))
        p = tl.exp2(scores - larger[:, None])
        alpha = tl.exp2(most - larger)
        total = total * alpha + tl.sum(p, 1)
        v = load(values + offsets[:, None], dims[None, :], D)
        acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc * alpha[:, None])
        most = larger
    for start in tl.range(seen_by_all, last, BLOCK_T, num_stages=1):
        positions = start + tl.arange(0, BLOCK_T)
        is_known = positions < last
        if WINDOW > 0 or CHUNK > 0:
            # Blocks that no row sees are not this sequence's any more: another may have left NaN there.
            is_known = is_known & (positions >= oldest)
        blocks = tl.load(table + positions // BLOCK_SIZE, mask=is_known, other=0).to(tl.int64)
        offsets = blocks * block_stride + (positions % BLOCK_SIZE) * token_stride
        k = load(keys + offsets[None, :], dims[:, None], D, is_known[None, :])
        scores = capped(tl.dot(q, k.to(q.dtype)) * scale, SOFTCAP)
        # Rows after the end of a tile see what its last row sees: they are not stored, but may not divide by nothing.
        is_seen = (positions[None, :] <= first + m[:, None]) & is_known[None, :]
        if WINDOW > 0:
            is_seen = is_seen & (positions[None, :] > first + m[:, None] - WINDOW)
        if CHUNK > 0:
            is_seen = is_seen & (positions[None, :] >= (first + m[:, None]) // CHUNK * CHUNK)
        scores = tl.where(is_seen, scores, float("-inf"))
        larger = tl.maximum(most, tl.max(scores, 1))
        ceiling = larger
        if WINDOW > 0 or CHUNK > 0:
            # A row of which no key was seen so far has no score that others could be compared with.
            ceiling = tl.where(larger == float("-inf"), 0.0, larger)
        p = tl.exp2(scores - ceiling[:, None])
        alpha = tl.exp2(most - ceiling)
        total = total * alpha + tl.sum(p, 1)
        v = load(values + offsets[:, None], dims[None, :], D, is_known[:, None])
        acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc * alpha[:, None])
        most = larger
    if WINDOW > 0 or CHUNK > 0:
        # Rows after the end of a tile may see nothing.
        total = tl.where(total > 0, total, 1.0)
    attended = (widened(acc, values_ptr, value_scale) / total[:, None]).to(out_ptr.dtype.element_ty)
    store(out_ptr + rows[:, None] * (H * D) + head * D + dims[None, :], attended, dims[None, :], D, is_row)


@dataclass(frozen=True, slots=True)
class PrefillTiles:
    """Runs of at most `QUERY_TILE` tokens of one sequence each; all i64[tiles] on the device."""

    rows: Tensor  # of the first token in the flat columns
    positions: Tensor  # of the first token in its sequence
    lengths: Tensor  # tokens; 0: the tile is left out
    slots: Tensor

    def __len__(self) -> int:
        return len(self.rows)


def prefill_attention(
    qkv: Tensor,
    tiles: PrefillTiles,
    block_tables: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    chunk: int | None = None,
    temperature: tuple[int, float, int] = (0, 0.0, 0),
    scales: tuple[float, float] = (1.0, 1.0),
) -> None:
    """Causal attention (Dao, FlashAttention-2, 2023) of the tiles' rows, into their rows of `out`.

    qkv [tokens, more than num_heads * head_dim]: rotated queries stand first in a row; keys and values of these tokens
    are in the cache [num_blocks, block_size, num_kv_heads, head_dim] already; out [tokens, num_heads * head_dim];
    `scale`: of scores; `window`: tokens that a query sees, itself included; `softcap`: scores are softcap *
    tanh(score / softcap); `sinks` [num_heads]: scores that take part in each head's softmax and have no value;
    `chunk`: contexts are cut into so many tokens, of which a query sees its own; `temperature`: the (floor_scale,
    attn_scale, first) of `tempered`, of 0: none; `scales`: of keys and values that are kept as 8-bit floats.
    """
    head_dim = keys.shape[-1]
    num_heads = out.shape[1] // head_dim
    tile = find_prefill_tile(triton.cdiv(len(qkv), QUERY_TILE) * num_heads, head_dim)
    dependent = has_dependent_launch(qkv.device)
    _prefill_attention[(num_heads, len(tiles))](
        qkv,
        keys,
        values,
        out,
        tiles.rows,
        tiles.positions,
        tiles.lengths,
        tiles.slots,
        block_tables,
        sinks if sinks is not None else qkv,
        scale * scales[0] * _LOG2E,
        scales[1],
        qkv.stride(0),
        block_tables.stride(0),
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        H=num_heads,
        D=head_dim,
        G=num_heads // keys.shape[2],
        BLOCK_SIZE=keys.shape[1],
        BLOCK_M=QUERY_TILE,
        BLOCK_T=tile.keys,
        STAGES=tile.stages,
        WINDOW=window or 0,
        CHUNK=chunk or 0,
        FLOOR_SCALE=temperature[0],
        ATTN_SCALE=temperature[1],
        FIRST=temperature[2],
        SOFTCAP=(softcap or 0.0) * _LOG2E,
        SINKS=sinks is not None,
        DEPENDENT=dependent,
        **options(warps=tile.warps, dependent=dependent),
    )
