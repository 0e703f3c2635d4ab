"""One token a row: the most likely one, or one drawn at a temperature as `worker_svc.core.sampler` does, in one pass
over the logits and a second look at the part of the vocabulary that won.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker_svc.core.kernels.launch import has_dependent_launch, options, release, wait
from worker_svc.core.kernels.sampling.parts import PART_COUNTER, PART_TOKENS
from worker_svc.core.kernels.sampling.truncation import Cutoffs
from worker_svc.core.kernels.state.tables import SlotTables

_GAMMA = tl.constexpr(0x9E3779B97F4A7C15 - 2**64)
_MUL1 = tl.constexpr(0xBF58476D1CE4E5B9 - 2**64)
_MUL2 = tl.constexpr(0x94D049BB133111EB - 2**64)
_BELOW_ONE = tl.constexpr(1 - 2**-24)
_LOG2E = tl.constexpr(1.4426950408889634)
_COLDEST = tl.constexpr(1e30)  # the largest 1 / temperature: nought times infinity would be no number
_PART_COUNTER = tl.constexpr(PART_COUNTER)
_NO_TOKEN = tl.constexpr(2**31 - 1)


@triton.jit
def _mix(value):
    """SplitMix64's step (Steele, Lea and Flood, 2014) on i64."""
    value = value + _GAMMA
    value = (value ^ ((value >> 30) & ((1 << 34) - 1))) * _MUL1
    value = (value ^ ((value >> 27) & ((1 << 37) - 1))) * _MUL2
    return value ^ ((value >> 31) & ((1 << 33) - 1))


@triton.jit
def _log_ring_time(key, counters):
    """log(-log(1 - u)) for each counter's u in (0, 1); counters are i64."""
    bits = (_mix(key + counters * _GAMMA) >> 32) & ((1 << 32) - 1)
    u = tl.minimum((bits.to(tl.float32) + 0.5) * 2.0**-32, _BELOW_ONE)
    # The winners are small: there the device's fast logarithm of 1 - u would lose them, the series of 2 atanh does not.
    z = u / (2.0 - u)
    z2 = z * z
    series = 2.0 * z * (1.0 + z2 * (1.0 / 3 + z2 * (1.0 / 5 + z2 * (1.0 / 7 + z2 * (1.0 / 9)))))
    return tl.log(tl.where(u < 0.25, series, -tl.log(1.0 - u)))


@triton.jit
def _cut(x, top, lowest, temperature):
    """-inf instead of what is not to be drawn."""
    scaled = tl.div_rn(x - top, tl.where(lowest > float("-inf"), temperature, 1.0))
    return tl.where(scaled >= lowest, x, float("-inf"))


@triton.jit
def _weigh_part(
    logits_ptr,  # [rows, columns]
    temperatures_ptr,  # f32[rows]
    top_ptr,  # f32[rows]: see `Cutoffs`, as the next
    lowest_ptr,  # f32[rows]
    most_ptr,  # f32[rows, parts]: the largest logit
    mass_ptr,  # f32[rows, parts]: of rows that draw, the sum of exp((logit - most) / temperature)
    tokens_ptr,  # i32[rows, parts]: of rows that do not, where the largest stands
    num_columns,
    row_stride,
    PART: tl.constexpr,
    HAS_CUTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    wait(DEPENDENT)
    release(DEPENDENT)
    place = row * tl.num_programs(1) + part
    columns = part * PART + tl.arange(0, PART)
    is_column = columns < num_columns
    temperature = tl.load(temperatures_ptr + row)
    x = tl.load(logits_ptr + row * row_stride + columns, mask=is_column, other=float("-inf")).to(tl.float32)
    if HAS_CUTS:
        x = _cut(x, tl.load(top_ptr + row), tl.load(lowest_ptr + row), temperature)
    most = tl.max(x, 0)
    tl.store(most_ptr + place, most)
    if temperature > 0:
        # Nothing is left of a part: zero instead of -inf - -inf.
        base = tl.where(most == float("-inf"), 0.0, most)
        colder = tl.minimum(1.0 / temperature, _COLDEST) * _LOG2E
        tl.store(mass_ptr + place, tl.sum(tl.exp2((x - base) * colder), 0))
    else:
        # Of equals the first, as torch's argmax.
        tl.store(tokens_ptr + place, tl.min(tl.where(x == most, columns, _NO_TOKEN), 0))


@triton.jit
def _choose(
    logits_ptr,  # [rows, columns]
    temperatures_ptr,  # f32[rows]
    seeds_ptr,  # i64[rows]
    positions_ptr,  # i64[rows]
    top_ptr,  # as above, and the next four
    lowest_ptr,
    most_ptr,
    mass_ptr,
    tokens_ptr,
    out_ptr,  # i64[rows]
    num_columns,
    row_stride,
    num_parts,
    slots_ptr,  # i64[rows]
    num_computed_ptr,  # i64[slots]
    histories_ptr,  # i32[slots, tokens]
    histories_stride,
    dummy_slot,
    PART: tl.constexpr,
    PARTS: tl.constexpr,  # power of two from num_parts
    HAS_CUTS: tl.constexpr,
    ADVANCE: tl.constexpr,  # the slots but the dummy, whose tokens before `positions` are computed
    DEPENDENT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    wait(DEPENDENT)
    release(DEPENDENT)
    parts = tl.arange(0, PARTS)
    is_part = parts < num_parts
    places = row * num_parts + parts
    temperature = tl.load(temperatures_ptr + row)
    most = tl.load(most_ptr + places, mask=is_part, other=float("-inf"))
    top = tl.max(most, 0)
    if temperature > 0:
        # An exponential race of the parts, then one within the winner.
        key = _mix(tl.load(seeds_ptr + row) ^ _mix(tl.load(positions_ptr + row)))
        mass = tl.load(mass_ptr + places, mask=is_part, other=0.0)
        weight = (most - top) / temperature + tl.log(tl.where(mass > 0, mass, 1.0))
        weight = tl.where(mass > 0, weight, float("-inf"))
        race = weight - _log_ring_time(key, parts.to(tl.int64) + _PART_COUNTER)
        part = tl.min(tl.where(race == tl.max(race, 0), parts, PARTS), 0)
        columns = part * PART + tl.arange(0, PART)
        is_column = columns < num_columns
        x = tl.load(logits_ptr + row * row_stride + columns, mask=is_column, other=float("-inf")).to(tl.float32)
        if HAS_CUTS:
            x = _cut(x, tl.load(top_ptr + row), tl.load(lowest_ptr + row), temperature)
        # In logits instead of log-probabilities: no temperature overflows.
        score = x - temperature * _log_ring_time(key, columns.to(tl.int64))
        token = tl.min(tl.where(score == tl.max(score, 0), columns, _NO_TOKEN), 0)
    else:
        tokens = tl.load(tokens_ptr + places, mask=is_part, other=_NO_TOKEN)
        token = tl.min(tl.where(most == top, tokens, _NO_TOKEN), 0)
    tl.store(out_ptr + row, token.to(tl.int64))
    if ADVANCE:
        slot = tl.load(slots_ptr + row)
        position = tl.load(positions_ptr + row)
        tl.store(histories_ptr + slot * histories_stride + position, token, mask=slot != dummy_slot)
        tl.store(num_computed_ptr + slot, position, mask=slot != dummy_slot)


def sample_tokens(
    logits: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    positions: Tensor,
    cutoffs: Cutoffs | None = None,
    advance: tuple[Tensor, SlotTables] | None = None,
) -> Tensor:
    """Tokens i64[rows] of logits [rows, vocab_size].

    temperatures f32[rows], 0 takes the most likely token; seeds and positions i64[rows] as `noise.uniform` takes them;
    cutoffs: of each row, what is not drawn; advance: the rows' slots i64[rows], whose tokens are entered at
    `positions`, up to where all others are computed then; the slot that pads batches stays as it is.
    """
    rows, columns = logits.shape
    parts = triton.cdiv(columns, PART_TOKENS)
    most = torch.empty(rows, parts, device=logits.device)
    mass = torch.empty(rows, parts, device=logits.device)
    tokens = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    top, lowest = (cutoffs.most, cutoffs.lowest) if cutoffs is not None else (temperatures, temperatures)
    dependent = has_dependent_launch(logits.device)
    _weigh_part[(rows, parts)](
        logits,
        temperatures,
        top,
        lowest,
        most,
        mass,
        tokens,
        columns,
        logits.stride(0),
        PART=PART_TOKENS,
        HAS_CUTS=cutoffs is not None,
        DEPENDENT=dependent,
        **options(warps=4, dependent=dependent),
    )
    slots, state = advance if advance is not None else (positions, None)
    _choose[(rows,)](
        logits,
        temperatures,
        seeds,
        positions,
        top,
        lowest,
        most,
        mass,
        tokens,
        out,
        columns,
        logits.stride(0),
        parts,
        slots,
        state.num_computed if state is not None else positions,
        state.tokens if state is not None else tokens,
        state.tokens.stride(0) if state is not None else 0,
        state.dummy_slot if state is not None else 0,
        PART=PART_TOKENS,
        PARTS=triton.next_power_of_2(parts),
        HAS_CUTS=cutoffs is not None,
        ADVANCE=state is not None,
        DEPENDENT=dependent,
        **options(warps=8, dependent=dependent),
    )
    return out
