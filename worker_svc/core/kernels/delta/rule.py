"""The gated delta rule (Yang et al., "Gated Delta Networks", 2024), on states where they lie.

Of a token that decodes, one kernel does all that comes between the products but the last norm. Longer chunks are cut
into pieces of `_PIECE` tokens, whose corrections are a triangular system (Yang et al., "Parallelizing Linear
Transformers with the Delta Rule", 2024), solved row by row; the rest of a piece is matrix products. A program has some
columns of one head's matrix, which depend on no others.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker_svc.core.kernels.delta.convolution import convolved_row
from worker_svc.core.kernels.delta.sequences import Sequences, begin
from worker_svc.core.kernels.delta.weights import DeltaHeads, DeltaWeights
from worker_svc.core.kernels.launch import has_dependent_launch, options, release, wait

_PIECE = 16  # tokens
_COLUMNS = 32  # of a head's matrix, in a program
_NORM_EPS = tl.constexpr(1e-6)  # of queries and keys, whatever that of norms


@triton.jit
def _decay(rate_ptr, bias_ptr, head, decay):
    """The logarithm of what a head's matrix is multiplied with, f32, of what a product gave."""
    x = decay.to(tl.float32) + tl.load(bias_ptr + head)
    # log(1 + exp(x)), of which no term is too large.
    softplus = tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))
    return tl.load(rate_ptr + head) * softplus


@triton.jit
def _decode(
    projected_ptr,  # [rows, CHANNELS + gates + 2 * VALUE_HEADS]
    conv_ptr,  # [CHANNELS, WIDTH]
    rate_ptr,  # f32[VALUE_HEADS], as the next
    bias_ptr,
    seen_ptr,  # [slots, WIDTH, CHANNELS]
    matrices_ptr,  # f32[slots, VALUE_HEADS, KEY_DIM, VALUE_DIM]
    slots_ptr,  # i64[rows], as the next
    contexts_ptr,
    out_ptr,  # [rows, VALUE_HEADS * VALUE_DIM]
    row_stride,
    scale,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    KEY_TILE: tl.constexpr,  # power of two from KEY_DIM
    COLUMNS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    row, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    CHANNELS: tl.constexpr = 2 * KEYS + VALUE_HEADS * VALUE_DIM
    EACH: tl.constexpr = VALUE_HEADS // KEY_HEADS
    dims, columns = tl.arange(0, KEY_TILE), part * COLUMNS + tl.arange(0, COLUMNS)
    is_dim, is_column = dims < KEY_DIM, columns < VALUE_DIM
    wait(DEPENDENT)
    release(DEPENDENT)
    slot, position = tl.load(slots_ptr + row), tl.load(contexts_ptr + row) - 1
    projected = projected_ptr + row * row_stride
    seen = seen_ptr + slot * WIDTH * CHANNELS
    of_query = head // EACH * KEY_DIM + dims
    of_value = 2 * KEYS + head * VALUE_DIM + columns
    query, new_query = convolved_row(projected, conv_ptr, seen, of_query, is_dim, position, CHANNELS, WIDTH)
    key, new_key = convolved_row(projected, conv_ptr, seen, KEYS + of_query, is_dim, position, CHANNELS, WIDTH)
    value, new_value = convolved_row(projected, conv_ptr, seen, of_value, is_column, position, CHANNELS, WIDTH)
    # Others may still read what tokens before this one left, which stands elsewhere.
    here = seen + position % WIDTH * CHANNELS
    is_first = (part == 0) & (head % EACH == 0)
    tl.store(here + of_query, new_query, mask=is_dim & is_first)
    tl.store(here + KEYS + of_query, new_key, mask=is_dim & is_first)
    tl.store(here + of_value, new_value, mask=is_column)
    query = query * tl.rsqrt(tl.sum(query * query, 0) + _NORM_EPS) * scale
    key = key * tl.rsqrt(tl.sum(key * key, 0) + _NORM_EPS)
    betas = projected + CHANNELS + VALUE_HEADS * VALUE_DIM
    beta = tl.sigmoid(tl.load(betas + head).to(tl.float32))
    decay = tl.exp(_decay(rate_ptr, bias_ptr, head, tl.load(betas + VALUE_HEADS + head)))
    places = matrices_ptr + (slot * VALUE_HEADS + head) * KEY_DIM * VALUE_DIM
    places += dims[:, None] * VALUE_DIM + columns[None, :]
    is_cell = is_dim[:, None] & is_column[None, :]
    matrix = tl.load(places, mask=is_cell & (position > 0), other=0.0) * decay
    correction = beta * (value - tl.sum(matrix * key[:, None], 0))
    matrix += key[:, None] * correction[None, :]
    tl.store(places, matrix, mask=is_cell)
    read = tl.sum(matrix * query[:, None], 0)
    out = out_ptr + row * VALUE_HEADS * VALUE_DIM + head * VALUE_DIM + columns
    tl.store(out, read.to(out_ptr.dtype.element_ty), mask=is_column)


@triton.jit
def _recur(
    projected_ptr,  # [rows, CHANNELS + gates + 2 * VALUE_HEADS]: betas and decays
    mixed_ptr,  # [rows, CHANNELS]
    rate_ptr,  # f32[VALUE_HEADS], as the next
    bias_ptr,
    matrices_ptr,  # f32[slots, VALUE_HEADS, KEY_DIM, VALUE_DIM]
    slots_ptr,  # i64[seqs], as the next two
    contexts_ptr,
    ends_ptr,
    out_ptr,  # [rows, VALUE_HEADS * VALUE_DIM]
    row_stride,
    scale,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_TILE: tl.constexpr,  # power of two from KEY_DIM
    COLUMNS: tl.constexpr,
    PIECE: tl.constexpr,
    PRECISION: tl.constexpr,  # of products with the matrix
    OF_KEYS: tl.constexpr,  # of those among keys, which the triangular system is made of
    DEPENDENT: tl.constexpr,
):
    seq, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    CHANNELS: tl.constexpr = 2 * KEYS + VALUE_HEADS * VALUE_DIM
    EACH: tl.constexpr = VALUE_HEADS // KEY_HEADS
    dims, columns = tl.arange(0, KEY_TILE), part * COLUMNS + tl.arange(0, COLUMNS)
    is_dim, is_column = dims < KEY_DIM, columns < VALUE_DIM
    offsets = tl.arange(0, PIECE)
    wait(DEPENDENT)
    release(DEPENDENT)
    slot, start, length, position = begin(slots_ptr, contexts_ptr, ends_ptr, seq)
    if length > 0:
        places = matrices_ptr + (slot * VALUE_HEADS + head) * KEY_DIM * VALUE_DIM
        places += dims[:, None] * VALUE_DIM + columns[None, :]
        is_cell = is_dim[:, None] & is_column[None, :]
        matrix = tl.load(places, mask=is_cell & (position > 0), other=0.0)
        for first in range(0, length, PIECE):
            is_token = first + offsets < length
            rows = start + first + offsets
            of_query = mixed_ptr + rows[:, None] * CHANNELS + head // EACH * KEY_DIM + dims[None, :]
            is_key = is_token[:, None] & is_dim[None, :]
            query = tl.load(of_query, mask=is_key, other=0.0).to(tl.float32)
            key = tl.load(of_query + KEYS, mask=is_key, other=0.0).to(tl.float32)
            query = query * (tl.rsqrt(tl.sum(query * query, 1) + _NORM_EPS) * scale)[:, None]
            key = key * tl.rsqrt(tl.sum(key * key, 1) + _NORM_EPS)[:, None]
            of_value = mixed_ptr + rows[:, None] * CHANNELS + 2 * KEYS + head * VALUE_DIM + columns[None, :]
            is_value = is_token[:, None] & is_column[None, :]
            value = tl.load(of_value, mask=is_value, other=0.0).to(tl.float32)
            betas = projected_ptr + rows * row_stride + CHANNELS + VALUE_HEADS * VALUE_DIM + head
            beta = tl.sigmoid(tl.load(betas, mask=is_token, other=0.0).to(tl.float32))
            decay = tl.load(betas + VALUE_HEADS, mask=is_token, other=0.0)
            decay = tl.where(is_token, _decay(rate_ptr, bias_ptr, head, decay), 0.0)
            since_begin = tl.cumsum(decay, 0)
            until_end = tl.exp(tl.sum(decay, 0) - since_begin)
            # A difference of those that stand the other way round may be large: it is nobody's.
            is_earlier = offsets[:, None] >= offsets[None, :]
            between = tl.exp(tl.where(is_earlier, since_begin[:, None] - since_begin[None, :], 0.0))
            between = tl.where(is_earlier, between, 0.0)
            from_begin = tl.exp(since_begin)[:, None]
            among = tl.dot(key, tl.trans(key), input_precision=OF_KEYS) * between * beta[:, None]
            kept = from_begin * tl.dot(key, matrix, input_precision=PRECISION)
            corrections = beta[:, None] * (value - kept)
            for token in range(1, PIECE):
                is_row = offsets == token
                weights = tl.sum(tl.where(is_row[:, None] & (offsets[None, :] < token), among, 0.0), 0)
                found = tl.sum(weights[:, None] * corrections, 0)
                corrections -= tl.where(is_row[:, None], found[None, :], 0.0)
            read = from_begin * tl.dot(query, matrix, input_precision=PRECISION)
            seen = tl.dot(query, tl.trans(key), input_precision=OF_KEYS) * between
            read += tl.dot(seen, corrections, input_precision=PRECISION)
            out = out_ptr + rows[:, None] * VALUE_HEADS * VALUE_DIM + head * VALUE_DIM + columns[None, :]
            tl.store(out, read.to(out_ptr.dtype.element_ty), mask=is_value)
            weighted = tl.trans(key * until_end[:, None])
            matrix = tl.exp(tl.sum(decay, 0)) * matrix + tl.dot(weighted, corrections, input_precision=PRECISION)
        tl.store(places, matrix, mask=is_cell)


def decode(
    projected: Tensor,
    weights: DeltaWeights,
    shape: DeltaHeads,
    seen: Tensor,
    matrices: Tensor,
    *,
    slots: Tensor,
    contexts: Tensor,
) -> Tensor:
    """As `StepStates.recur`, of rows that are a token each, the last of the first `contexts` i64[rows] of `slots`
    i64[rows]; `seen` and `matrices` are a layer's of `SlotStates`.
    """
    out = projected.new_empty(len(projected), shape.num_value_heads * shape.value_dim)
    dependent = has_dependent_launch(projected.device)
    _decode[(len(projected), shape.num_value_heads, triton.cdiv(shape.value_dim, _COLUMNS))](
        projected,
        weights.conv,
        weights.decay_rate,
        weights.decay_bias,
        seen,
        matrices,
        slots,
        contexts,
        out,
        projected.stride(0),
        shape.key_dim**-0.5,
        **_sizes(shape),
        WIDTH=shape.conv_width,
        DEPENDENT=dependent,
        **options(warps=4, dependent=dependent),
    )
    return out


def recur(
    projected: Tensor,
    mixed: Tensor,
    weights: DeltaWeights,
    shape: DeltaHeads,
    matrices: Tensor,
    sequences: Sequences,
) -> Tensor:
    """As `StepStates.recur`, of chunks whose queries, keys and values are `mixed` [rows, channels] already."""
    out = projected.new_empty(len(projected), shape.num_value_heads * shape.value_dim)
    dependent, is_whole = has_dependent_launch(projected.device), projected.dtype == torch.float32
    _recur[(len(sequences.slots), shape.num_value_heads, triton.cdiv(shape.value_dim, _COLUMNS))](
        projected,
        mixed,
        weights.decay_rate,
        weights.decay_bias,
        matrices,
        sequences.slots,
        sequences.contexts,
        sequences.ends,
        out,
        projected.stride(0),
        shape.key_dim**-0.5,
        **_sizes(shape),
        PIECE=_PIECE,
        PRECISION="ieee" if is_whole else "tf32",
        # Three products of TF32 are as exact as one of f32, which would take too many registers.
        OF_KEYS="ieee" if is_whole else "tf32x3",
        DEPENDENT=dependent,
        **options(warps=4, dependent=dependent),
    )
    return out


def _sizes(shape: DeltaHeads) -> dict[str, int]:
    return {
        "KEY_HEADS": shape.num_key_heads,
        "VALUE_HEADS": shape.num_value_heads,
        "KEY_DIM": shape.key_dim,
        "VALUE_DIM": shape.value_dim,
        "KEY_TILE": max(16, triton.next_power_of_2(shape.key_dim)),
        "COLUMNS": _COLUMNS,
    }
