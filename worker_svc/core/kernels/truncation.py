"""Where top-k, top-p and min-p cut a row of logits off, found without sorting it: the order of floats is that of their
bits, of which two are decided in each pass over the row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker_svc.core.kernels.launch import options

_BLOCK = 2048
_SIGN = tl.constexpr(0x80000000)


@triton.jit
def _descending(x):
    """u32 in the opposite order of f32."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where(bits >= _SIGN, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def _first_reaching(row_ptr, num_columns, most, temperature, goal, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The first value in descending order up to which there are `goal` values or, MASS, as much of their weight."""
    columns = tl.arange(0, BLOCK)
    part = tl.arange(0, 4).to(tl.uint32)
    base = tl.zeros((1,), tl.uint32)
    size = tl.full((1,), 1 << 30, tl.uint32)  # of each of the four parts in which the last bits may lie
    for _ in range(16):
        ends = base + part * size + (size - 1)
        amounts = tl.zeros((BLOCK, 4), tl.float32)
        for start in range(0, num_columns, BLOCK):
            is_column = start + columns < num_columns
            x = tl.load(row_ptr + start + columns, mask=is_column, other=float("-inf")).to(tl.float32)
            weight = tl.exp((x - most) / temperature) if MASS else tl.where(is_column, 1.0, 0.0)
            amounts += tl.where(_descending(x)[:, None] <= ends[None, :], weight[:, None], 0.0)
        missed = tl.sum((tl.sum(amounts, 0) < goal).to(tl.int32), 0)
        base += tl.minimum(missed, 3).to(tl.uint32) * size
        size = size >> 2
    bits = tl.sum(base, 0).to(tl.uint32)
    return tl.where(bits >= _SIGN, bits, bits ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def _floors(
    logits_ptr,  # [rows, columns]
    temperatures_ptr,  # f32[rows]
    top_k_ptr,  # i64[rows]
    top_p_ptr,  # f32[rows]
    lowest_ptr,  # f32[rows]: logarithm of min-p
    floors_ptr,  # f32[rows]
    num_columns,
    row_stride,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures_ptr + row)
    top_k = tl.load(top_k_ptr + row).to(tl.float32)
    top_p = tl.load(top_p_ptr + row)
    lowest = tl.load(lowest_ptr + row)
    floor = float("-inf")
    if (temperature > 0) & ((top_k > 0) | (top_p < 1) | (lowest > float("-inf"))):
        row_ptr = logits_ptr + row * row_stride
        columns = tl.arange(0, BLOCK)
        best = tl.full((BLOCK,), float("-inf"), tl.float32)
        for start in range(0, num_columns, BLOCK):
            is_column = start + columns < num_columns
            x = tl.load(row_ptr + start + columns, mask=is_column, other=float("-inf")).to(tl.float32)
            best = tl.maximum(best, x)
        most = tl.max(best, 0)
        last = float("-inf")
        if top_k > 0:
            last = _first_reaching(row_ptr, num_columns, most, temperature, top_k, False, BLOCK)
        if top_p < 1:
            # The weight of what top-k left: of those as likely as its last one, as many as it had room for.
            counts = tl.zeros((BLOCK,), tl.float32)
            weights = tl.zeros((BLOCK,), tl.float32)
            for start in range(0, num_columns, BLOCK):
                is_column = start + columns < num_columns
                x = tl.load(row_ptr + start + columns, mask=is_column, other=float("-inf")).to(tl.float32)
                is_above = x > last
                counts += tl.where(is_above, 1.0, 0.0)
                weights += tl.where(is_above, tl.exp((x - most) / temperature), 0.0)
            total = tl.sum(weights, 0)
            if top_k > 0:
                total += (top_k - tl.sum(counts, 0)) * tl.exp((last - most) / temperature)
            last = tl.maximum(
                last, _first_reaching(row_ptr, num_columns, most, temperature, top_p * total, True, BLOCK)
            )
        # The division may make equals of neighbours, which all stay.
        threshold = tl.maximum(tl.div_rn(last - most, temperature), lowest)
        least = tl.full((BLOCK,), float("inf"), tl.float32)
        for start in range(0, num_columns, BLOCK):
            is_column = start + columns < num_columns
            x = tl.load(row_ptr + start + columns, mask=is_column, other=float("inf")).to(tl.float32)
            least = tl.minimum(least, tl.where(tl.div_rn(x - most, temperature) >= threshold, x, float("inf")))
        floor = tl.min(least, 0)
    tl.store(floors_ptr + row, floor)


def floors(logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The smallest logit f32[rows] of each row of logits [rows, vocab_size] that may be drawn; -inf: all may.

    temperatures f32[rows], top_k i64[rows] (0 keeps all), top_p f32[rows] (1 keeps all) of what top-k left, min_p
    f32[rows] (0 keeps all) relative to the likeliest. Tokens as likely as the last one kept stay.
    """
    rows, columns = logits.shape
    out = torch.empty(rows, device=logits.device)
    _floors[(rows,)](
        logits,
        temperatures,
        top_k,
        top_p,
        min_p.log(),
        out,
        columns,
        logits.stride(0),
        BLOCK=min(_BLOCK, triton.next_power_of_2(columns)),
        **options(warps=16 if columns > _BLOCK else 4),
    )
    return out
