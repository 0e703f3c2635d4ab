"""The tiles of contexts that each program has: contexts as one line, in equal shares."""

import triton
import triton.language as tl

PLAN_COLUMNS = 12
COLUMNS = tl.constexpr(PLAN_COLUMNS)


# Not compiled again for a number of sequences that divides by 16: steps that are no graphs have any.
@triton.jit(do_not_specialize=["sequences", "table_stride"])
def plan_shares(
    rows_ptr,  # i64[sequences]
    slots_ptr,  # i64[sequences]
    contexts_ptr,  # i64[sequences]: tokens with KV
    tables_ptr,  # i32[slots, blocks]
    plan_ptr,  # i32[shares, PLAN_COLUMNS], see below
    sequences,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    COST: tl.constexpr,  # of a context's begin and end, in tiles
    ADDED: tl.constexpr,  # of parts that are added up, in tiles
    SEQUENCES: tl.constexpr,  # power of two from `sequences`
):
    """Contexts lie one after the other on a line, each as long as COST and its tiles of BLOCK_T tokens. Programs have
    equal shares of the line, and attend to the tiles that begin there; or each has as many whole contexts, give or
    take one, where so many of the longest would not be more than such a share by over ADDED.

    A share's plan: its first sequence, the token at which it begins there, and its number of tiles. Then the first
    sequence's parts: where the first one is kept, the first and the last share that have one. Then the last sequence
    and, if it is another and goes on after this share, the last share that has a part of it, else 0. Then the first
    sequence's context, slot and row, and the block in which the share begins.
    """
    share = tl.program_id(0)
    index = tl.arange(0, SEQUENCES)
    contexts = tl.load(contexts_ptr + index, mask=index < sequences, other=0).to(tl.int32)
    lengths = tl.where(index < sequences, (contexts + BLOCK_T - 1) // BLOCK_T + COST, 0)
    ends = tl.cumsum(lengths, 0)
    total = tl.max(ends, 0)
    shares = tl.minimum(tl.num_programs(0), total)
    left, right = _begin_of(share, shares, total), _begin_of(share + 1, shares, total)
    first, opening, end, first_tile = _find(ends, lengths, index, sequences, left, COST)
    last, last_opening, last_end, last_tiles = _find(ends, lengths, index, sequences, right, COST)
    count = last_opening - last * COST + last_tiles - (opening - first * COST + first_tile)
    first_share = _share_of(opening + COST, shares, total)
    # In its first share it is the second part, unless that begins with it.
    first_place = first_share * 2 + (_begin_of(first_share, shares, total) < opening).to(tl.int32)
    last_share = _share_of(end - 1, shares, total)
    has_last = (last_tiles > 0) & (last != first)
    last_sequence_share = tl.where(has_last, _share_of(last_end - 1, shares, total), 0)
    most_contexts = (sequences + shares - 1) // shares
    if most_contexts * tl.max(lengths, 0) <= total // shares + ADDED:
        first, after = share * sequences // shares, (share + 1) * sequences // shares
        first_tile = 0
        count = tl.sum(tl.where((index >= first) & (index < after), lengths - COST, 0), 0)
        first_place, first_share, last_share = share * 2, share, share
        last, last_sequence_share = first, 0
    plan = plan_ptr + share * COLUMNS
    tl.store(plan, first)
    tl.store(plan + 1, first_tile * BLOCK_T)
    tl.store(plan + 2, tl.where(share < shares, count, 0))
    tl.store(plan + 3, first_place)
    tl.store(plan + 4, first_share)
    tl.store(plan + 5, last_share)
    tl.store(plan + 6, last)
    tl.store(plan + 7, last_sequence_share)
    is_there = first < sequences
    slot = tl.load(slots_ptr + first, mask=is_there, other=0)
    tl.store(plan + 8, tl.load(contexts_ptr + first, mask=is_there, other=0).to(tl.int32))
    tl.store(plan + 9, slot.to(tl.int32))
    tl.store(plan + 10, tl.load(rows_ptr + first, mask=is_there, other=0).to(tl.int32))
    block = tables_ptr + slot * table_stride + first_tile * BLOCK_T // BLOCK_SIZE
    tl.store(plan + 11, tl.load(block, mask=is_there & (count > 0), other=0))


@triton.jit
def _begin_of(share, shares, total):
    """The place of the line at which a share begins."""
    return (total.to(tl.int64) * share // shares).to(tl.int32)


@triton.jit
def _share_of(place, shares, total):
    """The share that has a place of the line."""
    return (((place + 1).to(tl.int64) * shares - 1) // total).to(tl.int32)


@triton.jit
def _find(ends, lengths, index, sequences, place, COST: tl.constexpr):
    """The sequence at a place of the line, its begin and end there, and how many of its tiles are before the place."""
    is_before = (ends <= place) & (index < sequences)
    sequence = tl.sum(is_before.to(tl.int32), 0)
    opening = tl.max(tl.where(is_before, ends, 0), 0)
    end = opening + tl.sum(tl.where(index == sequence, lengths, 0), 0)
    return sequence, opening, end, tl.maximum(0, place - opening - COST)
