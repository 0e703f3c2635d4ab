"""Logprobs and ranks of some rows' tokens, and the logprobs of the likeliest ones: each part of a row counts what is
likelier than its token and finds its own likeliest one after the other, and the row's are among these.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from contract.domain.params import MAX_LOGPROBS
from worker_svc.core.kernels.launch import options
from worker_svc.core.kernels.sampling.tuning import LOGPROBS

_ROOM = triton.next_power_of_2(MAX_LOGPROBS)  # for the likeliest of a part
_NO_TOKEN = tl.constexpr(2**31 - 1)


@triton.jit
def _take_likeliest(x, token_ids, is_left):
    """The largest of those that are left, of equals the first; and which are left then."""
    most = tl.max(tl.where(is_left, x, float("-inf")), 0)
    token_id = tl.min(tl.where(is_left & (x == most), token_ids, _NO_TOKEN), 0)
    return most, token_id, is_left & (token_ids != token_id)


@triton.jit(do_not_specialize=["num_top"])
def _rank_parts(
    logits_ptr,  # [rows, columns]
    rows_ptr,  # i64[l]
    token_ids_ptr,  # i64[rows]
    above_ptr,  # i32[l, parts]: logits that are larger than that of the row's token
    most_ptr,  # f32[l, parts]: the largest logit
    mass_ptr,  # f32[l, parts]: the sum of exp(logit - most)
    top_ptr,  # f32[l, parts, ROOM]: the largest logits, and
    top_ids_ptr,  # i32[l, parts, ROOM]: where they stand
    num_columns,
    row_stride,
    num_top,
    PART: tl.constexpr,
    ROOM: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    row = tl.load(rows_ptr + tl.program_id(0))
    columns = tl.program_id(1) * PART + tl.arange(0, PART)
    is_left = columns < num_columns
    x = tl.load(logits_ptr + row * row_stride + columns, mask=is_left, other=float("-inf")).to(tl.float32)
    own = tl.load(logits_ptr + row * row_stride + tl.load(token_ids_ptr + row)).to(tl.float32)
    tl.store(above_ptr + place, tl.sum((x > own).to(tl.int32), 0))
    most = tl.max(x, 0)
    # A part may have nothing at all.
    base = tl.where(most == float("-inf"), 0.0, most)
    tl.store(most_ptr + place, most)
    tl.store(mass_ptr + place, tl.sum(tl.exp(x - base), 0))
    for rank in range(num_top):
        likeliest, token_id, is_left = _take_likeliest(x, columns, is_left)
        tl.store(top_ptr + place * ROOM + rank, likeliest)
        tl.store(top_ids_ptr + place * ROOM + rank, token_id)


@triton.jit(do_not_specialize=["num_top"])
def _rank(
    logits_ptr,  # [rows, columns]
    rows_ptr,  # i64[l]
    token_ids_ptr,  # i64[rows]
    above_ptr,
    most_ptr,
    mass_ptr,
    top_ptr,
    top_ids_ptr,
    own_out_ptr,  # f32[l]
    ranks_out_ptr,  # i64[l]
    top_out_ptr,  # f32[l, num_top]
    top_ids_out_ptr,  # i64[l, num_top]
    row_stride,
    num_parts,
    num_top,
    PARTS: tl.constexpr,  # power of two from num_parts
    ROOM: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + index)
    parts = tl.arange(0, PARTS)
    is_part = parts < num_parts
    places = index * num_parts + parts
    most = tl.load(most_ptr + places, mask=is_part, other=float("-inf"))
    mass = tl.load(mass_ptr + places, mask=is_part, other=0.0)
    top = tl.max(most, 0)
    whole = top + tl.log(tl.sum(mass * tl.exp(most - top), 0))
    own = tl.load(logits_ptr + row * row_stride + tl.load(token_ids_ptr + row)).to(tl.float32)
    tl.store(own_out_ptr + index, own - whole)
    above = tl.load(above_ptr + places, mask=is_part, other=0)
    tl.store(ranks_out_ptr + index, tl.sum(above, 0).to(tl.int64) + 1)
    ranks = tl.arange(0, ROOM)
    offsets = places[:, None] * ROOM + ranks[None, :]
    is_inside = is_part[:, None] & (ranks[None, :] < num_top)
    x = tl.reshape(tl.load(top_ptr + offsets, mask=is_inside, other=float("-inf")), (PARTS * ROOM,))
    token_ids = tl.reshape(tl.load(top_ids_ptr + offsets, mask=is_inside, other=_NO_TOKEN), (PARTS * ROOM,))
    is_left = token_ids != _NO_TOKEN
    for rank in range(num_top):
        likeliest, token_id, is_left = _take_likeliest(x, token_ids, is_left)
        tl.store(top_out_ptr + index * num_top + rank, likeliest - whole)
        tl.store(top_ids_out_ptr + index * num_top + rank, token_id.to(tl.int64))


def token_logprobs(
    logits: Tensor, token_ids: Tensor, rows: Tensor, num_top: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of `rows` i64[l] of logits [rows, vocab_size]: logprobs f32[l] of their tokens, of token_ids i64[rows], and their
    ranks i64[l]; which tokens i64[l, num_top] are the likeliest, these first and of equals the first, and their
    logprobs f32[l, num_top].

    `num_top` is at most `MAX_LOGPROBS`, and the vocabulary has as many tokens.
    """
    device, asked, columns = logits.device, len(rows), logits.shape[1]
    parts = triton.cdiv(columns, LOGPROBS.columns)
    most, mass = (torch.empty(asked, parts, device=device) for _ in range(2))
    above = torch.empty(asked, parts, dtype=torch.int32, device=device)
    top = torch.empty(asked, parts, _ROOM, device=device)
    top_ids = torch.empty(asked, parts, _ROOM, dtype=torch.int32, device=device)
    own, likeliest = torch.empty(asked, device=device), torch.empty(asked, num_top, device=device)
    ranks, likeliest_ids = (torch.empty(asked, *n, dtype=torch.int64, device=device) for n in ((), (num_top,)))
    _rank_parts[(asked, parts)](
        logits,
        rows,
        token_ids,
        above,
        most,
        mass,
        top,
        top_ids,
        columns,
        logits.stride(0),
        num_top,
        PART=LOGPROBS.columns,
        ROOM=_ROOM,
        **options(warps=4),
    )
    _rank[(asked,)](
        logits,
        rows,
        token_ids,
        above,
        most,
        mass,
        top,
        top_ids,
        own,
        ranks,
        likeliest,
        likeliest_ids,
        logits.stride(0),
        parts,
        num_top,
        PARTS=triton.next_power_of_2(parts),
        ROOM=_ROOM,
        **options(warps=8),
    )
    return own, ranks, likeliest_ids, likeliest
