"""The cuts of top-k, top-p and min-p through a row of logits, without sorting it. A first kernel looks at every logit
once: many programs a row, each for some groups of columns. A second finds the cut, one program a row, which as a rule
looks only at the few groups that have something to keep: the largest of each are logits of the row themselves, so where
they alone reach what is looked for, nothing below can be the cut. Nothing is added up in an order that depends on the
batch.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker_svc.core.kernels.launch import has_dependent_launch, options, release, wait
from worker_svc.core.kernels.sampling.tuning import TRUNCATION

_NEXT = tl.constexpr(16)  # of them, that all are compared with at once
_LOG2E = tl.constexpr(1.4426950408889634)
_COLDEST = tl.constexpr(1e30)  # the largest 1 / temperature: nought times infinity would be no number
_FAR = tl.constexpr(1e8)  # from the largest, where a bound need not be looked for: no weight overflows
_COARSE = tl.constexpr(16)  # bits of f32 that are enough for a bound
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
def _key(x, BITS: tl.constexpr):
    """i64 in the order of f32, whose upper bits it is made of."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> (32 - BITS)).to(tl.int64)


@triton.jit
def _value(key, BITS: tl.constexpr):
    """The inverse of `_key`, the lower bits zeros."""
    bits = key.to(tl.int32) << (32 - BITS)
    flipped = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return ((flipped >> (32 - BITS)) << (32 - BITS)).to(tl.float32, bitcast=True)


@triton.jit
def _colder(temperature):
    return tl.minimum(1.0 / temperature, _COLDEST) * _LOG2E


@triton.jit
def _weigh(x, most, colder):
    """The weight of x against `most`."""
    return tl.exp2((x - most) * colder)


@triton.jit
def _look_at_groups(
    logits_ptr,  # [rows, columns]
    temperatures_ptr,  # f32[rows]
    top_k_ptr,  # i64[rows]
    top_p_ptr,  # f32[rows]
    most_ptr,  # f32[rows, groups]: the largest logit
    mass_ptr,  # f32[rows, groups]: weight of all against that; for rows with top-p alone
    num_columns,
    row_stride,
    num_groups,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    wait(DEPENDENT)
    release(DEPENDENT)
    temperature = tl.load(temperatures_ptr + row)
    if temperature > 0:
        columns = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        is_column = columns < num_columns
        x = tl.load(logits_ptr + row * row_stride + columns, mask=is_column, other=float("-inf")).to(tl.float32)
        most = tl.max(x, 1)
        places, is_group = row * num_groups + groups, groups < num_groups
        tl.store(most_ptr + places, most, mask=is_group)
        if (tl.load(top_p_ptr + row) < 1) & (tl.load(top_k_ptr + row) == 0):
            # Nothing is left of a group: zero instead of -inf - -inf.
            base = tl.where(most == float("-inf"), 0.0, most)
            mass = tl.sum(_weigh(x, base[:, None], _colder(temperature)), 1)
            tl.store(mass_ptr + places, mass, mask=is_group)


@triton.jit
def _narrow(low, high, step, first, second, third, goal):
    """The part of [low, high) that is left, in steps of which the first three reach so much of the goal."""
    reached = (first >= goal).to(tl.int64) + (second >= goal).to(tl.int64) + (third >= goal).to(tl.int64)
    return low + reached * step, tl.minimum(high, low + (reached + 1) * step)


@triton.jit
def _bound(maxima, weights, masses, most, colder, goal, GROUP: tl.constexpr):
    """A value that the goal is surely reached with, by what is known of groups: their maxima, and what these and all of
    them weigh.
    """
    low, high = _key(tl.full((), float("-inf"), tl.float32), _COARSE), _key(most, _COARSE) + 1
    while high - low > 1:
        step = (high - low + 3) // 4
        first = _surely(maxima, weights, masses, _value(low + step, _COARSE), most, colder, GROUP)
        second = _surely(maxima, weights, masses, _value(low + step * 2, _COARSE), most, colder, GROUP)
        third = _surely(maxima, weights, masses, _value(low + step * 3, _COARSE), most, colder, GROUP)
        low, high = _narrow(low, high, step, first, second, third, goal)
    return _value(low, _COARSE)


@triton.jit
def _surely(maxima, weights, masses, end, most, colder, GROUP: tl.constexpr):
    """The least that there is from `end` up: of each group its maximum, or all but what the others can be below."""
    others = (GROUP - 1) * _weigh(tl.maximum(end, most - _FAR), most, colder)
    return tl.sum(tl.where(maxima >= end, tl.maximum(weights, masses - others), 0.0), 0)


@triton.jit
def _load_groups(near, start, GROUP: tl.constexpr, TILE: tl.constexpr):
    """Logits f32[TILE, GROUP] of the listed groups from `start` on; -inf after the last."""
    row_ptr, num_columns, near_ptr, num_near = near
    places = start + tl.arange(0, TILE)
    groups = tl.load(near_ptr + places, mask=places < num_near, other=num_columns)
    columns = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    return tl.load(row_ptr + columns, mask=columns < num_columns, other=float("-inf")).to(tl.float32)


@triton.jit
def _add_up(near, first, second, third, most, colder, MASS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr):
    """The weight, or the number, of those that are at least `first`, `second` and `third`."""
    firsts = tl.zeros((TILE, GROUP), tl.float32)
    seconds = tl.zeros((TILE, GROUP), tl.float32)
    thirds = tl.zeros((TILE, GROUP), tl.float32)
    for start in range(0, near[3], TILE):
        x = _load_groups(near, start, GROUP, TILE)
        weights = _weigh(x, most, colder) if MASS else 1.0
        firsts += (x >= first).to(tl.float32) * weights
        seconds += (x >= second).to(tl.float32) * weights
        thirds += (x >= third).to(tl.float32) * weights
    return tl.sum(firsts), tl.sum(seconds), tl.sum(thirds)


@triton.jit
def _search(
    near, least, most, colder, goal, MASS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, BITS: tl.constexpr
):
    """The largest value, at least `least`, that the goal is reached with."""
    low, high = _key(least, BITS), _key(most, BITS) + 1
    while high - low > 1:
        step = (high - low + 3) // 4
        ends = _value(low + step, BITS), _value(low + step * 2, BITS), _value(low + step * 3, BITS)
        first, second, third = _add_up(near, ends[0], ends[1], ends[2], most, colder, MASS, GROUP, TILE)
        low, high = _narrow(low, high, step, first, second, third, goal)
    return _value(low, BITS)


@triton.jit
def _list(near, least, values_ptr, GROUP: tl.constexpr, TILE: tl.constexpr, LISTED: tl.constexpr):
    """Write down the values from `least` up; how many there are, or more than LISTED."""
    count, start = 0, 0
    while (start < near[3]) & (count <= LISTED):
        x = tl.reshape(_load_groups(near, start, GROUP, TILE), [TILE * GROUP])
        is_listed = (x >= least) & (x > float("-inf"))
        places = count + tl.cumsum(is_listed.to(tl.int32), 0) - 1
        tl.store(values_ptr + places, x, mask=is_listed & (places < LISTED))
        count += tl.sum(is_listed.to(tl.int32), 0)
        start += TILE
    return count


@triton.jit
def _upto_each(values, values_ptr, count, least, most, colder, MASS: tl.constexpr, LISTED: tl.constexpr):
    """For each value f32[LISTED]: of those listed that it does not exceed, from `least` up, the weight or number."""
    sums = tl.zeros((LISTED,), tl.float32)
    for start in range(0, count, _NEXT):
        places = start + tl.arange(0, _NEXT)
        others = tl.load(values_ptr + places, mask=places < count, other=float("-inf"))
        weights = _weigh(others, most, colder) if MASS else 1.0
        weights = tl.where((places < count) & (others >= least), weights, 0.0)
        sums += tl.sum(tl.where(others[None, :] >= values[:, None], weights[None, :], 0.0), 1)
    return sums


@triton.jit
def _without(excess, mass, last, most, colder):
    """The tokens that top-k leaves: of those as likely as its last one, as many as it has room for."""
    return mass - tl.maximum(excess, 0.0) * _weigh(last, most, colder)


@triton.jit
def _last_listed(values_ptr, count, least, most, colder, top_k, top_p, goal, LISTED: tl.constexpr):
    """The last value that is left, of those listed: each compared with all. The goal is of what is looked for first."""
    listed = tl.arange(0, LISTED)
    values = tl.load(values_ptr + listed, mask=listed < count, other=float("-inf"))
    last = least
    excess = 0.0
    if top_k > 0:
        upto = _upto_each(values, values_ptr, count, last, most, colder, False, LISTED)
        last = tl.maximum(last, tl.max(tl.where(upto >= goal, values, float("-inf")), 0))
        excess = tl.max(tl.where(values >= last, upto, 0.0), 0) - top_k
    if top_p < 1:
        mass = _upto_each(values, values_ptr, count, last, most, colder, True, LISTED)
        if top_k > 0:
            goal = top_p * _without(excess, tl.max(mass, 0), last, most, colder)
        last = tl.maximum(last, tl.max(tl.where(mass >= goal, values, float("-inf")), 0))
    return last


@triton.jit
def _last_near(
    near, least, most, colder, top_k, top_p, goal, GROUP: tl.constexpr, TILE: tl.constexpr, BITS: tl.constexpr
):
    """The last value that is left, looked for in all listed groups."""
    last = least
    if top_k > 0:
        last = _search(near, last, most, colder, goal, False, GROUP, TILE, BITS)
    if top_p < 1:
        if top_k > 0:
            number, _, _ = _add_up(near, last, last, last, most, colder, False, GROUP, TILE)
            mass, _, _ = _add_up(near, last, last, last, most, colder, True, GROUP, TILE)
            goal = top_p * _without(number - top_k, mass, last, most, colder)
        last = _search(near, last, most, colder, goal, True, GROUP, TILE, BITS)
    return last


@triton.jit
def _find_cuts(
    logits_ptr,
    temperatures_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,  # f32[rows]
    most_ptr,
    mass_ptr,
    near_ptr,  # i32[rows, groups]: groups in which something may be left
    values_ptr,  # f32[rows, LISTED]: what may be
    top_ptr,  # f32[rows]
    lowest_ptr,  # f32[rows]
    num_columns,
    row_stride,
    num_groups,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,  # power of two from their number
    TILE: tl.constexpr,
    SEARCHED: tl.constexpr,
    NEAR: tl.constexpr,
    LISTED: tl.constexpr,
    BITS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    wait(DEPENDENT)
    release(DEPENDENT)
    temperature = tl.load(temperatures_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    most = 0.0
    lowest = float("-inf")
    if temperature > 0:
        groups = tl.arange(0, GROUPS)
        is_group = groups < num_groups
        maxima = tl.load(most_ptr + row * num_groups + groups, mask=is_group, other=float("-inf"))
        most = tl.max(maxima, 0)
        last = float("-inf")
        if (top_k > 0) | (top_p < 1):
            row_ptr = logits_ptr + row * row_stride
            near_ptr += row * num_groups
            values_ptr += row * LISTED
            colder = _colder(temperature)
            masses = tl.load(mass_ptr + row * num_groups + groups, mask=is_group & (top_k == 0), other=0.0)
            weights = _weigh(maxima, most, colder)
            masses *= weights
            goal = top_p * tl.sum(masses, 0)
            if top_k > 0:  # first, and looked for with ones for weights
                goal = top_k.to(tl.float32)
                weights = tl.full((GROUPS,), 1.0, tl.float32)
            least = _bound(maxima, weights, masses, most, colder, goal, GROUP)
            is_near = (maxima >= least) & is_group
            places = tl.cumsum(is_near.to(tl.int32), 0) - 1
            tl.store(near_ptr + places, groups, mask=is_near)
            num_near = tl.sum(is_near.to(tl.int32), 0)
            tl.debug_barrier()
            near = row_ptr, num_columns, near_ptr, num_near
            count = LISTED + 1
            if num_near <= NEAR:
                count = _list(near, least, values_ptr, GROUP, TILE, LISTED)
                tl.debug_barrier()
            if count <= LISTED:
                last = _last_listed(values_ptr, count, least, most, colder, top_k, top_p, goal, LISTED)
            else:
                last = _last_near(near, least, most, colder, top_k, top_p, goal, GROUP, SEARCHED, BITS)
        # The likeliest is left even of a top-p that is nought in fp32.
        lowest = tl.div_rn(tl.minimum(last, most) - most, temperature)
        if min_p > 0:
            lowest = tl.maximum(lowest, tl.log(min_p))
    tl.store(top_ptr + row, most)
    tl.store(lowest_ptr + row, lowest)


def cutoffs(logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Cutoffs:
    """The tokens that may be drawn of each row of logits [rows, vocab_size].

    temperatures f32[rows], top_k i64[rows] (0 keeps all), top_p f32[rows] (1 keeps all) of what top-k left, min_p
    f32[rows] (0 keeps all) relative to the likeliest.
    """
    rows, columns = logits.shape
    device, stride = logits.device, logits.stride(0)
    groups = triton.cdiv(columns, TRUNCATION.group)
    # Memory of its own each, since kernels are compiled again for pointers that are not aligned.
    maxima, masses = (torch.empty(rows, groups, device=device) for _ in range(2))
    near = torch.empty(rows, groups, dtype=torch.int32, device=device)
    values = torch.empty(rows, TRUNCATION.listed, device=device)
    most, lowest = (torch.empty(rows, device=device) for _ in range(2))
    dependent = has_dependent_launch(device)
    _look_at_groups[(rows, triton.cdiv(groups, TRUNCATION.groups))](
        logits,
        temperatures,
        top_k,
        top_p,
        maxima,
        masses,
        columns,
        stride,
        groups,
        GROUP=TRUNCATION.group,
        GROUPS=TRUNCATION.groups,
        DEPENDENT=dependent,
        **options(warps=4, dependent=dependent),
    )
    _find_cuts[(rows,)](
        logits,
        temperatures,
        top_k,
        top_p,
        min_p,
        maxima,
        masses,
        near,
        values,
        most,
        lowest,
        columns,
        stride,
        groups,
        GROUP=TRUNCATION.group,
        GROUPS=triton.next_power_of_2(groups),
        TILE=TRUNCATION.listing,
        SEARCHED=TRUNCATION.searching,
        NEAR=TRUNCATION.near,
        LISTED=TRUNCATION.listed,
        BITS=_BITS[logits.dtype],
        DEPENDENT=dependent,
        **options(warps=TRUNCATION.warps, dependent=dependent),
    )
    return Cutoffs(most, lowest)
