"""One token a row in one pass over the logits: the most likely one, or one drawn at a temperature.

The noise is that of `worker_svc.core.noise`, made where it is used.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker_svc.core.kernels.launch import options

_GAMMA = tl.constexpr(0x9E3779B97F4A7C15 - 2**64)
_MUL1 = tl.constexpr(0xBF58476D1CE4E5B9 - 2**64)
_MUL2 = tl.constexpr(0x94D049BB133111EB - 2**64)
_BELOW_ONE = tl.constexpr(1 - 2**-24)
_PART = 4096  # columns of a program
_BLOCK = 1024


@triton.jit
def _mix(value):
    """SplitMix64's step (Steele, Lea and Flood, 2014) on i64."""
    value = value + _GAMMA
    value = (value ^ ((value >> 30) & ((1 << 34) - 1))) * _MUL1
    value = (value ^ ((value >> 27) & ((1 << 37) - 1))) * _MUL2
    return value ^ ((value >> 31) & ((1 << 33) - 1))


@triton.jit
def _log_ring_time(key, columns):
    """log(-log(1 - u)) for each column's u in (0, 1)."""
    bits = (_mix(key + columns.to(tl.int64) * _GAMMA) >> 32) & ((1 << 32) - 1)
    u = tl.minimum((bits.to(tl.float32) + 0.5) * 2.0**-32, _BELOW_ONE)
    # The winners are small: there the device's fast logarithm of 1 - u would lose them, the series of 2 atanh does not.
    z = u / (2.0 - u)
    z2 = z * z
    series = 2.0 * z * (1.0 + z2 * (1.0 / 3 + z2 * (1.0 / 5 + z2 * (1.0 / 7 + z2 * (1.0 / 9)))))
    return tl.log(tl.where(u < 0.25, series, -tl.log(1.0 - u)))


@triton.jit
def _best_of_part(
    logits_ptr,  # [rows, columns]
    temperatures_ptr,  # f32[rows]
    seeds_ptr,  # i64[rows]
    positions_ptr,  # i64[rows]
    floors_ptr,  # f32[rows]: what is below is not drawn
    scores_ptr,  # f32[rows, parts]
    tokens_ptr,  # i32[rows, parts]
    num_columns,
    row_stride,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_FLOORS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    temperature = tl.load(temperatures_ptr + row)
    key = _mix(tl.load(seeds_ptr + row) ^ _mix(tl.load(positions_ptr + row)))
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    token = tl.full((BLOCK,), 2147483647, tl.int32)
    for start in range(0, PART, BLOCK):
        columns = part * PART + start + tl.arange(0, BLOCK)
        is_column = columns < num_columns
        x = tl.load(logits_ptr + row * row_stride + columns, mask=is_column, other=float("-inf")).to(tl.float32)
        if HAS_FLOORS:
            x = tl.where(x >= tl.load(floors_ptr + row), x, float("-inf"))
        if temperature > 0:
            # An exponential race in logits instead of log-probabilities: no temperature overflows.
            x = x - temperature * _log_ring_time(key, columns)
        is_better = (x > best) | ((token == 2147483647) & is_column)
        token = tl.where(is_better, columns, token)
        best = tl.where(is_better, x, best)
    score = tl.max(best, 0)
    # Of equals the first, as torch's argmax.
    winner = tl.min(tl.where(best == score, token, 2147483647), 0)
    tl.store(scores_ptr + row * tl.num_programs(1) + part, score)
    tl.store(tokens_ptr + row * tl.num_programs(1) + part, winner)


@triton.jit
def _best_of_row(scores_ptr, tokens_ptr, out_ptr, num_parts, PARTS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, PARTS)
    is_part = parts < num_parts
    scores = tl.load(scores_ptr + row * num_parts + parts, mask=is_part, other=float("-inf"))
    tokens = tl.load(tokens_ptr + row * num_parts + parts, mask=is_part, other=2147483647)
    winner = tl.min(tl.where(scores == tl.max(scores, 0), tokens, 2147483647), 0)
    tl.store(out_ptr + row, winner.to(tl.int64))


def sample_tokens(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, floors: Tensor | None = None
) -> Tensor:
    """Tokens i64[rows] of logits [rows, vocab_size].

    temperatures f32[rows], 0 takes the most likely token; seeds and positions i64[rows] as `noise.uniform` takes them;
    floors f32[rows]: smaller logits are not drawn.
    """
    rows, columns = logits.shape
    parts = triton.cdiv(columns, _PART)
    scores = torch.empty(rows, parts, device=logits.device)
    tokens = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _best_of_part[(rows, parts)](
        logits,
        temperatures,
        seeds,
        positions,
        floors if floors is not None else temperatures,
        scores,
        tokens,
        columns,
        logits.stride(0),
        PART=_PART,
        BLOCK=_BLOCK,
        HAS_FLOORS=floors is not None,
        **options(warps=4),
    )
    _best_of_row[(rows,)](scores, tokens, out, parts, PARTS=triton.next_power_of_2(parts), **options(warps=1))
    return out
