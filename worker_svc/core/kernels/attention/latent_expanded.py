"""Latent attention of chunks of prompts with keys and values of each head, made of the latents of their contexts.

A pair of tokens costs less than where queries meet the latent (DeepSeek-V2, 2024, calls that absorbed): products of
plain, rotated and value dimensions instead of twice the rank. In return each token of a context is brought to all
heads once a step.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from worker_svc.core.kernels.attention.head_dims import load, store, tile_dims
from worker_svc.core.kernels.attention.latent_shape import LatentShape
from worker_svc.core.kernels.attention.latent_tiles import padded
from worker_svc.core.kernels.attention.rope import rotate
from worker_svc.core.kernels.attention.tuning import ExpandedTile, find_expanded_tile
from worker_svc.core.kernels.launch import has_dependent_launch, options, release, shared_memory, wait

CONTEXT_TILE = 128  # tokens of a context that a program brings to heads
QUERY_ROWS = 128  # tokens of a chunk that a program attends for
_LOG2E = 1.4426950408889634
_OUTPUTS, _STEP, _STAGES = 128, 64, 3  # of a program that brings latents to heads, the latent dimensions of its steps


@dataclass(frozen=True, slots=True)
class ContextTiles:
    """Runs of at most `CONTEXT_TILE` tokens of a context; all i64[tiles] on the device."""

    positions: Tensor  # of the first token in its sequence
    lengths: Tensor  # tokens; 0: the tile is left out
    slots: Tensor
    places: Tensor  # of the first token in what is made of them

    def __len__(self) -> int:
        return len(self.positions)


@dataclass(frozen=True, slots=True)
class QueryTiles:
    """Runs of at most `QUERY_ROWS` tokens of one chunk each; all i64[tiles] on the device."""

    rows: Tensor  # of the first token in the flat columns
    positions: Tensor  # of the first token in its sequence
    lengths: Tensor  # tokens; 0: the tile is left out
    places: Tensor  # where the sequence's context begins in what `expand` made

    def __len__(self) -> int:
        return len(self.rows)


# Not compiled again for numbers that divide by 16: steps that are no graphs have any.
@triton.jit(do_not_specialize=["table_stride"])
def _expand(
    cached_ptr,  # of each half of a token's head first the rotated, then the latent dimensions
    up_ptr,  # [H (PLAIN + VALUES), RANK]
    expanded_ptr,  # [places, H (PLAIN + VALUES) + ROTATED]
    positions_ptr,  # see `ContextTiles`, as the next
    lengths_ptr,
    slots_ptr,
    places_ptr,
    tables_ptr,  # i32[slots, blocks]
    table_stride,
    block_stride,
    token_stride,
    OUTPUTS: tl.constexpr,  # H (PLAIN + VALUES)
    RANK: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program for some outputs of a tile; the first of a tile copies the rotated key, too."""
    PAIRS: tl.constexpr = ROTATED // 2
    LATENT: tl.constexpr = RANK // 2
    STEPS: tl.constexpr = (LATENT + BLOCK_K - 1) // BLOCK_K  # of a half
    tile = tl.program_id(1)
    length = tl.load(lengths_ptr + tile).to(tl.int32)
    wait(DEPENDENT)
    release(DEPENDENT)
    if length == 0:
        return
    token = tl.arange(0, BLOCK_M)
    is_token = token < length
    positions = tl.load(positions_ptr + tile).to(tl.int32) + token
    table = tables_ptr + tl.load(slots_ptr + tile) * table_stride
    blocks = tl.load(table + positions // BLOCK_SIZE, mask=is_token, other=0).to(tl.int64)
    cells = cached_ptr + (blocks * block_stride + (positions % BLOCK_SIZE) * token_stride)[:, None]
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output = outputs < OUTPUTS
    weights = up_ptr + outputs[None, :] * RANK
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in tl.range(0, 2 * STEPS, num_stages=STAGES):
        half = step // STEPS
        dims = step % STEPS * BLOCK_K + tl.arange(0, BLOCK_K)
        is_dim = dims < LATENT
        latents = cells + half * (PAIRS + LATENT) + PAIRS + dims[None, :]
        c = tl.load(latents, mask=is_token[:, None] & is_dim[None, :], other=0.0)
        w = tl.load(weights + half * LATENT + dims[:, None], mask=is_dim[:, None] & is_output[None, :], other=0.0)
        acc = tl.dot(c, w, acc)
    rows = expanded_ptr + (tl.load(places_ptr + tile) + token)[:, None] * (OUTPUTS + ROTATED)
    is_both = is_token[:, None] & is_output[None, :]
    tl.store(rows + outputs[None, :], acc.to(expanded_ptr.dtype.element_ty), mask=is_both)
    if tl.program_id(0) == 0:
        dim = tl.arange(0, triton.next_power_of_2(ROTATED))[None, :]
        place = dim + tl.where(dim < PAIRS, 0, LATENT)
        is_turned = is_token[:, None] & (dim < ROTATED)
        tl.store(rows + OUTPUTS + dim, tl.load(cells + place, mask=is_turned, other=0.0), mask=is_turned)


@triton.jit
def _keys_values(
    rows, dims, values, pair, is_known, turned, PLAIN: tl.constexpr, VALUES: tl.constexpr, PAIRS: tl.constexpr
):
    """Plain keys, both halves of rotated ones and values of a tile of the context, at `rows` [BLOCK_T, 1]."""
    return (
        load(rows + dims, dims, PLAIN, is_known),
        load(rows + turned + pair, pair, PAIRS, is_known),
        load(rows + turned + PAIRS + pair, pair, PAIRS, is_known),
        load(rows + PLAIN + values, values, VALUES, is_known),
    )


@triton.jit
def _add_tile(scores, v, most, total, acc):
    """One tile more: the running maximum, sum of exponentials and weighted values."""
    larger = tl.maximum(most, tl.max(scores, 1))
    p = tl.exp2(scores - larger[:, None])
    alpha = tl.exp2(most - larger)
    total = total * alpha + tl.sum(p, 1)
    return larger, total, tl.dot(p.to(v.dtype), v, acc * alpha[:, None])


@triton.jit(do_not_specialize=["query_stride"])
def _attend_expanded(
    queries_ptr,  # [tokens, H (PLAIN + ROTATED)], not yet rotated
    expanded_ptr,  # see `_expand`
    rotary_ptr,  # f32[positions, RANK + ROTATED]: cosines, then sines, of each half the rotated dimensions first
    out_ptr,  # [tokens, H VALUES]
    rows_ptr,  # see `QueryTiles`, as the next
    positions_ptr,
    lengths_ptr,
    places_ptr,
    scale,  # of scores, to the base of 2
    query_stride,
    H: tl.constexpr,
    PLAIN: tl.constexpr,
    VALUES: tl.constexpr,
    RANK: tl.constexpr,
    ROTATED: tl.constexpr,
    PAIRED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program a head of a tile."""
    PAIRS: tl.constexpr = ROTATED // 2
    OUTPUTS: tl.constexpr = H * (PLAIN + VALUES)
    D: tl.constexpr = RANK + ROTATED
    head, tile = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths_ptr + tile).to(tl.int32)
    first = tl.load(positions_ptr + tile).to(tl.int32)
    m = tl.arange(0, BLOCK_M)
    is_row = m[:, None] < length
    dims, values = tl.arange(0, padded(PLAIN))[None, :], tl.arange(0, padded(VALUES))[None, :]
    pair = tl.arange(0, padded(PAIRS))[None, :]
    angles = rotary_ptr + (first + m)[:, None] * D + pair
    wait(DEPENDENT)
    release(DEPENDENT)
    if length == 0:
        return
    row = tl.load(rows_ptr + tile) + m
    query = queries_ptr + row[:, None] * query_stride + head * (PLAIN + ROTATED)
    q = load(query + dims, dims, PLAIN, is_row)
    left, right = (2 * pair, 2 * pair + 1) if PAIRED else (pair, PAIRS + pair)
    a1 = load(query + PLAIN + left, pair, PAIRS, is_row).to(tl.float32)
    a2 = load(query + PLAIN + right, pair, PAIRS, is_row).to(tl.float32)
    a1, a2 = rotate(a1, a2, load(angles, pair, PAIRS, is_row), load(angles + D // 2, pair, PAIRS, is_row))
    a1, a2 = a1.to(q.dtype), a2.to(q.dtype)
    most = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, padded(VALUES)), tl.float32)
    context = expanded_ptr + tl.load(places_ptr + tile) * (OUTPUTS + ROTATED) + head * (PLAIN + VALUES)
    turned = OUTPUTS - head * (PLAIN + VALUES)  # from a head's keys to the rotated ones of all
    last = first + length
    seen_by_all = (first + 1) // BLOCK_T * BLOCK_T
    for start in tl.range(0, seen_by_all, BLOCK_T, num_stages=STAGES):
        rows = context + (start + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None] * (OUTPUTS + ROTATED)
        k, k1, k2, v = _keys_values(rows, dims, values, pair, None, turned, PLAIN, VALUES, PAIRS)
        scores = tl.dot(q, tl.trans(k))
        scores = tl.dot(a1, tl.trans(k1), scores)
        scores = tl.dot(a2, tl.trans(k2), scores) * scale
        most, total, acc = _add_tile(scores, v, most, total, acc)
    for start in tl.range(seen_by_all, last, BLOCK_T, num_stages=1):
        positions = start + tl.arange(0, BLOCK_T)
        is_known = positions < last
        rows = context + positions.to(tl.int64)[:, None] * (OUTPUTS + ROTATED)
        k, k1, k2, v = _keys_values(rows, dims, values, pair, is_known[:, None], turned, PLAIN, VALUES, PAIRS)
        scores = tl.dot(q, tl.trans(k))
        scores = tl.dot(a1, tl.trans(k1), scores)
        scores = tl.dot(a2, tl.trans(k2), scores) * scale
        # Rows after the end of a tile see what its last row sees: they are not stored, but may not divide by nothing.
        is_seen = (positions[None, :] <= first + m[:, None]) & is_known[None, :]
        most, total, acc = _add_tile(tl.where(is_seen, scores, float("-inf")), v, most, total, acc)
    outs = out_ptr + row[:, None] * (H * VALUES) + head * VALUES + values
    store(outs, (acc / total[:, None]).to(out_ptr.dtype.element_ty), values, VALUES, is_row)


def expand(
    cached: Tensor, up: Tensor, tiles: ContextTiles, block_tables: Tensor, shape: LatentShape, room: int
) -> Tensor:
    """Plain keys and values of all heads and then the rotated key of the tiles' tokens, at their places of `room`:
    [room, num_heads * (plain + values) + rotated], of which other places may be anything.

    cached [num_blocks, block_size, 1, rank + rotated]; up [num_heads, plain + values, rank], contiguous; block_tables
    i32[slots, blocks].
    """
    outputs = len(up) * (shape.plain + shape.values)
    expanded = cached.new_empty(room, outputs + shape.rotated)
    dependent = has_dependent_launch(cached.device)
    _expand[(triton.cdiv(outputs, _OUTPUTS), len(tiles))](
        cached,
        up,
        expanded,
        tiles.positions,
        tiles.lengths,
        tiles.slots,
        tiles.places,
        block_tables,
        block_tables.stride(0),
        cached.stride(0),
        cached.stride(1),
        OUTPUTS=outputs,
        RANK=shape.rank,
        ROTATED=shape.rotated,
        BLOCK_SIZE=cached.shape[1],
        BLOCK_M=CONTEXT_TILE,
        BLOCK_N=_OUTPUTS,
        BLOCK_K=min(_STEP, padded(shape.rank // 2)),
        STAGES=_STAGES,
        DEPENDENT=dependent,
        **options(warps=8, dependent=dependent),
    )
    return expanded


def attend_expanded(
    queries: Tensor, expanded: Tensor, tiles: QueryTiles, rotary: Tensor, scale: float, shape: LatentShape, out: Tensor
) -> None:
    """The causal attention (Dao, FlashAttention-2, 2023) of the tiles' rows over contexts that `expand` made, into
    their rows of `out` [tokens, num_heads * values].

    queries [tokens, num_heads * (plain + rotated)], not yet rotated, of any stride of rows; rotary f32[positions,
    rank + rotated]; scale: of scores.
    """
    tile, num_heads = _tile(queries, shape), out.shape[1] // shape.values
    dependent = has_dependent_launch(queries.device)
    _attend_expanded[(num_heads, len(tiles))](
        queries,
        expanded,
        rotary,
        out,
        tiles.rows,
        tiles.positions,
        tiles.lengths,
        tiles.places,
        scale * _LOG2E,
        queries.stride(0),
        H=num_heads,
        PLAIN=shape.plain,
        VALUES=shape.values,
        RANK=shape.rank,
        ROTATED=shape.rotated,
        PAIRED=shape.is_paired,
        BLOCK_M=QUERY_ROWS,
        BLOCK_T=tile.tokens,
        STAGES=tile.stages,
        DEPENDENT=dependent,
        **options(warps=tile.warps, dependent=dependent),
    )


def _tile(queries: Tensor, shape: LatentShape) -> ExpandedTile:
    key_bytes = (tile_dims(shape.plain) + tile_dims(shape.rotated)) * queries.element_size()
    value_bytes = tile_dims(shape.values) * queries.element_size()
    return find_expanded_tile(QUERY_ROWS * key_bytes, key_bytes + value_bytes, shared_memory(queries.device))
