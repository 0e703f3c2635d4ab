"""Where top-k, top-p and min-p cut a row of logits off, found without sorting it: the order of floats is that of their
bits, of which each pass over the row decides four. Many programs share a row; what they count in one pass, all of them
add up in the next.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker_svc.core.kernels.launch import options
from worker_svc.core.sampler import Cuts

_PART = 2048  # columns of a program: always the same, so that sums do not depend on the batch
_BLOCK = 256  # of these at a time
_SIGN = tl.constexpr(0x80000000)
_PASS_BITS = 4
_DIGITS = tl.constexpr(1 << _PASS_BITS)
# As f32, the lower bits of the others are zeros.
_BITS = {torch.bfloat16: 16, torch.float16: 20, torch.float32: 32}


@dataclass(frozen=True, slots=True)
class Cutoffs:
    """Of each row, both f32[rows]: a logit x is left if (x - most) / temperature, correctly rounded, is at least
    `lowest`; all are if that is -inf. Tokens as likely as the last one that is left are left.
    """

    most: Tensor
    lowest: Tensor


@triton.jit
def _descending(x):
    """u32 in the opposite order of f32."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where(bits >= _SIGN, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def _as_float(key, BITS: tl.constexpr):
    """What `_descending` made `key` of, whose lower bits are not known and were zeros."""
    bits = tl.where(key >= _SIGN, key, key ^ 0x7FFFFFFF)
    return ((bits >> (32 - BITS)) << (32 - BITS)).to(tl.float32, bitcast=True)


@triton.jit
def _find_most(
    logits_ptr,  # [rows, columns]
    temperatures_ptr,  # f32[rows]
    most_ptr,  # f32[rows, parts]
    num_columns,
    row_stride,
    PART: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    if tl.load(temperatures_ptr + row) > 0:
        columns = part * PART + tl.arange(0, PART)
        is_column = columns < num_columns
        x = tl.load(logits_ptr + row * row_stride + columns, mask=is_column, other=float("-inf")).to(tl.float32)
        tl.store(most_ptr + row * tl.num_programs(1) + part, tl.max(x, 0))


@triton.jit
def _load_most(most_ptr, row, num_parts, PARTS: tl.constexpr):
    parts = tl.arange(0, PARTS)
    return tl.max(tl.load(most_ptr + row * num_parts + parts, mask=parts < num_parts, other=float("-inf")), 0)


@triton.jit
def _add_up(sums_ptr, number, row, num_rows, num_parts, PARTS: tl.constexpr):
    """What pass `number` counted up to the end of each digit."""
    parts = tl.arange(0, PARTS)
    cells = ((number * num_rows + row) * num_parts + parts)[:, None] * _DIGITS + tl.arange(0, _DIGITS)[None, :]
    return tl.sum(tl.load(sums_ptr + cells, mask=(parts < num_parts)[:, None], other=0.0), 0)


@triton.jit
def _settle(sums_ptr, bases_ptr, row, num_rows, num_parts, number, size, goal, PARTS: tl.constexpr):
    """Of pass `number`, whose digits were of so many values: the one that the goal lies in, as the base of the next
    pass, and what there is up to its end.
    """
    digits = tl.arange(0, _DIGITS)
    sums = _add_up(sums_ptr, number, row, num_rows, num_parts, PARTS)
    digit = tl.minimum(tl.sum((sums < goal).to(tl.int32), 0), _DIGITS - 1)
    upto = tl.sum(tl.where(digits == digit, sums, 0.0), 0)
    return tl.load(bases_ptr + number * num_rows + row) + digit.to(tl.int64) * size, upto


@triton.jit
def _last_of_top_k(
    sums_ptr, bases_ptr, row, num_rows, num_parts, num_counts, top_k, PARTS: tl.constexpr, BITS: tl.constexpr
):
    """The last value that top-k leaves, and how many there are up to it; -inf and 0 where it was not looked for."""
    last, upto = float("-inf"), 0.0
    if (num_counts > 0) & (top_k > 0):
        key, upto = _settle(
            sums_ptr, bases_ptr, row, num_rows, num_parts, num_counts - 1, 1 << (32 - BITS), top_k, PARTS
        )
        last = _as_float(key.to(tl.uint32), BITS)
    return last, upto


@triton.jit(do_not_specialize=["number", "first", "size"])
def _count(
    logits_ptr,  # [rows, columns]
    temperatures_ptr,  # f32[rows]
    top_k_ptr,  # i64[rows]
    top_p_ptr,  # f32[rows]
    most_ptr,  # f32[rows, parts]
    sums_ptr,  # f32[passes, rows, parts, digits]: values or weight up to the end of each digit
    bases_ptr,  # i64[passes, rows]: bits that were known before the pass, as `_descending`
    excess_ptr,  # f32[rows]: weight that top-k does not leave of what is as likely as its last one
    goals_ptr,  # f32[rows]: how much weight top-p leaves
    num_columns,
    row_stride,
    number,
    first,  # pass of this search
    size,  # of a digit: how many bits of f32 fall into it
    PART: tl.constexpr,
    PARTS: tl.constexpr,  # power of two from their number
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,
    MASS: tl.constexpr,  # looks for top-p, behind a search for top-k if there are passes ahead of the first
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    num_rows, num_parts = tl.num_programs(0), tl.num_programs(1)
    temperature = tl.load(temperatures_ptr + row)
    top_k = tl.load(top_k_ptr + row).to(tl.float32)
    top_p = tl.load(top_p_ptr + row)
    digits = tl.arange(0, _DIGITS)
    if (temperature > 0) & ((top_p < 1) if MASS else (top_k > 0)):
        most = 0.0
        if MASS:
            most = _load_most(most_ptr, row, num_parts, PARTS)
        base = tl.full((), 0, tl.int64)
        last = float("-inf")
        if number > first:
            goal = top_k
            if MASS:
                goal = tl.load(goals_ptr + row)
                if number == first + 1:
                    sums = _add_up(sums_ptr, first, row, num_rows, num_parts, PARTS)
                    whole = tl.sum(tl.where(digits == _DIGITS - 1, sums, 0.0), 0)
                    goal = top_p * (whole - tl.load(excess_ptr + row))
                    if part == 0:
                        tl.store(goals_ptr + row, goal)
            base, _ = _settle(sums_ptr, bases_ptr, row, num_rows, num_parts, number - 1, size * _DIGITS, goal, PARTS)
        elif MASS:
            last, upto = _last_of_top_k(sums_ptr, bases_ptr, row, num_rows, num_parts, first, top_k, PARTS, BITS)
            if part == 0:
                # Of those as likely as its last one, top-k left as many as it had room for.
                excess = tl.where(upto > 0, (upto - top_k) * tl.exp((last - most) / temperature), 0.0)
                tl.store(excess_ptr + row, excess)
        place = number * num_rows + row
        if part == 0:
            tl.store(bases_ptr + place, base)
        ends = (base + digits.to(tl.int64) * size + (size - 1)).to(tl.uint32)
        sums = tl.zeros((BLOCK, _DIGITS), tl.float32)
        for start in range(part * PART, part * PART + PART, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            is_column = columns < num_columns
            x = tl.load(logits_ptr + row * row_stride + columns, mask=is_column, other=float("-inf")).to(tl.float32)
            if MASS:
                weight = tl.where(x >= last, tl.exp((x - most) / temperature), 0.0)
            else:
                weight = tl.where(is_column, 1.0, 0.0)
            sums += tl.where(_descending(x)[:, None] <= ends[None, :], weight[:, None], 0.0)
        tl.store(sums_ptr + (place * num_parts + part) * _DIGITS + digits, tl.sum(sums, 0))


@triton.jit(do_not_specialize=["num_counts", "num_passes"])
def _finish_cuts(
    temperatures_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,  # f32[rows]
    most_ptr,
    sums_ptr,
    bases_ptr,
    goals_ptr,
    top_ptr,  # f32[rows]
    lowest_ptr,  # f32[rows]
    num_parts,
    num_counts,  # passes for top-k
    num_passes,  # of both searches
    PARTS: tl.constexpr,
    BITS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    num_rows = tl.num_programs(0)
    temperature = tl.load(temperatures_ptr + row)
    top_k = tl.load(top_k_ptr + row).to(tl.float32)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    most = 0.0
    lowest = float("-inf")
    if temperature > 0:
        most = _load_most(most_ptr, row, num_parts, PARTS)
        last, _ = _last_of_top_k(sums_ptr, bases_ptr, row, num_rows, num_parts, num_counts, top_k, PARTS, BITS)
        if (num_passes > num_counts) & (top_p < 1):
            goal = tl.load(goals_ptr + row)
            key, _ = _settle(
                sums_ptr, bases_ptr, row, num_rows, num_parts, num_passes - 1, 1 << (32 - BITS), goal, PARTS
            )
            last = tl.maximum(last, _as_float(key.to(tl.uint32), BITS))
        lowest = tl.div_rn(last - most, temperature)
        if min_p > 0:
            lowest = tl.maximum(lowest, tl.log(min_p))
    tl.store(top_ptr + row, most)
    tl.store(lowest_ptr + row, lowest)


def cutoffs(logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, cuts: Cuts) -> Cutoffs:
    """What may be drawn of each row of logits [rows, vocab_size].

    temperatures f32[rows], top_k i64[rows] (0 keeps all), top_p f32[rows] (1 keeps all) of what top-k left, min_p
    f32[rows] (0 keeps all) relative to the likeliest; `cuts`: which of them some row asks for.
    """
    rows, columns = logits.shape
    device, bits = logits.device, _BITS[logits.dtype]
    parts = triton.cdiv(columns, _PART)
    num_counts = bits // _PASS_BITS if cuts.top_k else 0
    num_passes = num_counts + (bits // _PASS_BITS if cuts.top_p else 0)
    most = torch.empty(rows, parts, device=device)
    sums = torch.empty(num_passes, rows, parts, 1 << _PASS_BITS, device=device)
    bases = torch.empty(num_passes, rows, dtype=torch.int64, device=device)
    excess, goals = torch.empty(rows, device=device), torch.empty(rows, device=device)
    found = Cutoffs(torch.empty(rows, device=device), torch.empty(rows, device=device))
    stride, padded = logits.stride(0), triton.next_power_of_2(parts)
    _find_most[(rows, parts)](logits, temperatures, most, columns, stride, PART=_PART, **options(warps=4))
    for number in range(num_passes):
        first = 0 if number < num_counts else num_counts
        _count[(rows, parts)](
            logits,
            temperatures,
            top_k,
            top_p,
            most,
            sums,
            bases,
            excess,
            goals,
            columns,
            stride,
            number,
            first,
            1 << (32 - _PASS_BITS * (number - first + 1)),
            PART=_PART,
            PARTS=padded,
            BLOCK=_BLOCK,
            BITS=bits,
            MASS=number >= num_counts,
            **options(warps=4),
        )
    _finish_cuts[(rows,)](
        temperatures,
        top_k,
        top_p,
        min_p,
        most,
        sums,
        bases,
        goals,
        found.most,
        found.lowest,
        parts,
        num_counts,
        num_passes,
        PARTS=padded,
        BITS=bits,
        **options(warps=4),
    )
    return found
