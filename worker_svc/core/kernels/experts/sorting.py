"""The order of pairs by expert. What is launched does not depend on what is chosen."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker_svc.core.kernels.launch import has_dependent_launch, options, release, wait

_PAIRS, _WARPS = 1024, 4  # that a program looks at at once, where all pairs are few
# Pairs up to which a program finds those of an expert in all. More are sorted by parts: of 8,192 and 131,072 pairs of
# 128 experts an H200 takes 5.0 and 14 us so, in all 6.7 and 80; of 2,048 it takes 4.6 and 3.7.
_MOST_WHOLE = 4096
_PART, _PART_WARPS = 512, 4
_PARTS_AT_ONCE = 4096  # times experts, whose counts are read at once


@dataclass(frozen=True, slots=True)
class SortedPairs:
    """Pairs by expert."""

    order: Tensor  # i32[pairs]: those of the first expert, in order, then those of the next
    counts: Tensor  # i32[experts]: so many are each one's
    firsts: Tensor  # i32[experts]: where in `order` they begin


@triton.jit(do_not_specialize=["P"])
def _sort_pairs(
    ids_ptr,  # i32[P]
    order_ptr,  # i32[P]
    counts_ptr,  # i32[experts]
    firsts_ptr,  # i32[experts]
    P,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A program finds the pairs of one expert, twice: how many are those of experts before it, and its own."""
    expert = tl.program_id(0)
    places = tl.arange(0, BLOCK)
    wait(DEPENDENT)
    release(DEPENDENT)
    before = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, P, BLOCK):
        ids = tl.load(ids_ptr + start + places, mask=start + places < P, other=expert)
        before += (ids < expert).to(tl.int32)
    first = tl.sum(before, 0)
    end = first
    for start in range(0, P, BLOCK):
        ids = tl.load(ids_ptr + start + places, mask=start + places < P, other=-1)
        is_own = (ids == expert).to(tl.int32)
        tl.store(order_ptr + end + tl.cumsum(is_own, 0) - 1, start + places, mask=is_own > 0)
        end += tl.sum(is_own, 0)
    tl.store(counts_ptr + expert, end - first)
    tl.store(firsts_ptr + expert, first)


@triton.jit(do_not_specialize=["P"])
def _count_pairs(
    ids_ptr,  # i32[P]
    counts_ptr,  # i32[parts, EXPERTS]
    P,
    EXPERTS: tl.constexpr,
    PART: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A program counts those of each expert in one part of all pairs."""
    part = tl.program_id(0)
    PADDED: tl.constexpr = triton.next_power_of_2(EXPERTS)
    experts = tl.arange(0, PADDED)
    places = part * PART + tl.arange(0, PART)
    wait(DEPENDENT)
    release(DEPENDENT)
    ids = tl.load(ids_ptr + places, mask=places < P, other=0)
    counts = tl.histogram(ids, PADDED, mask=places < P)
    tl.store(counts_ptr + part * EXPERTS + experts, counts, mask=experts < EXPERTS)


@triton.jit(do_not_specialize=["P", "parts"])
def _sort_parts(
    ids_ptr,  # i32[P]
    part_counts_ptr,  # i32[parts, EXPERTS]
    order_ptr,  # i32[P]
    counts_ptr,  # i32[EXPERTS]
    firsts_ptr,  # i32[EXPERTS]
    P,
    parts,
    EXPERTS: tl.constexpr,
    PART: tl.constexpr,  # power of two
    PARTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A program sorts one part, and puts each expert's pairs after those of experts and of parts before."""
    part = tl.program_id(0)
    PADDED: tl.constexpr = triton.next_power_of_2(EXPERTS)
    experts = tl.arange(0, PADDED)
    is_expert = experts < EXPERTS
    places = tl.arange(0, PART)
    wait(DEPENDENT)
    release(DEPENDENT)
    # Those after the last pair come last.
    ids = tl.load(ids_ptr + part * PART + places, mask=part * PART + places < P, other=PADDED)
    own = tl.load(part_counts_ptr + part * EXPERTS + experts, mask=is_expert, other=0)
    before = tl.zeros((PARTS, PADDED), tl.int32)
    every = tl.zeros((PARTS, PADDED), tl.int32)
    for start in range(0, parts, PARTS):
        others = start + tl.arange(0, PARTS)[:, None]
        pointers = part_counts_ptr + others * EXPERTS + experts[None, :]
        counts = tl.load(pointers, mask=(others < parts) & is_expert[None, :], other=0)
        every += counts
        before += tl.where(others < part, counts, 0)
    totals = tl.sum(every, 0)
    firsts = tl.cumsum(totals, 0) - totals
    # Where each expert's pairs go, less where they stand in the sorted part.
    moves = firsts + tl.sum(before, 0) - (tl.cumsum(own, 0) - own)
    keys = tl.sort(ids * PART + places)
    ids, pairs = keys // PART, part * PART + keys % PART
    is_pair = ids < PADDED
    targets = places + tl.gather(moves, tl.where(is_pair, ids, 0), 0)
    tl.store(order_ptr + targets, pairs, mask=is_pair)
    if part == 0:
        tl.store(counts_ptr + experts, totals, mask=is_expert)
        tl.store(firsts_ptr + experts, firsts, mask=is_expert)


def sort_pairs(ids: Tensor, num_experts: int) -> SortedPairs:
    """Pairs by expert: ids i32[rows, top_k]."""
    num_pairs, device = ids.numel(), ids.device
    order = torch.empty(num_pairs, dtype=torch.int32, device=device)
    counts, firsts = torch.empty(2, num_experts, dtype=torch.int32, device=device)
    dependent = has_dependent_launch(device)
    if num_pairs <= _MOST_WHOLE:
        _sort_pairs[(num_experts,)](
            ids,
            order,
            counts,
            firsts,
            num_pairs,
            BLOCK=_PAIRS,
            DEPENDENT=dependent,
            **options(warps=_WARPS, dependent=dependent),
        )
        return SortedPairs(order, counts, firsts)
    parts = triton.cdiv(num_pairs, _PART)
    part_counts = torch.empty(parts, num_experts, dtype=torch.int32, device=device)
    _count_pairs[(parts,)](
        ids,
        part_counts,
        num_pairs,
        EXPERTS=num_experts,
        PART=_PART,
        DEPENDENT=dependent,
        **options(warps=_PART_WARPS, dependent=dependent),
    )
    _sort_parts[(parts,)](
        ids,
        part_counts,
        order,
        counts,
        firsts,
        num_pairs,
        parts,
        EXPERTS=num_experts,
        PART=_PART,
        PARTS=max(1, _PARTS_AT_ONCE // triton.next_power_of_2(num_experts)),
        DEPENDENT=dependent,
        **options(warps=_PART_WARPS, dependent=dependent),
    )
    return SortedPairs(order, counts, firsts)
