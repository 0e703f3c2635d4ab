"""The causal convolution of each channel over the tokens of sequences, and what further tokens see of these."""

import triton
import triton.language as tl
from torch import Tensor

from worker_svc.core.kernels.delta.sequences import Sequences, begin
from worker_svc.core.kernels.launch import has_dependent_launch, options, release, wait

_TOKENS, _CHANNELS = 16, 64  # of a tile


@triton.jit
def convolved_row(
    projected_ptr,  # the row of a token, [channels and more]
    conv_ptr,  # [CHANNELS, WIDTH]
    seen_ptr,  # the slot's, [WIDTH, CHANNELS]
    channels,
    is_there,
    position,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """silu of one token's convolution, f32, and its input; those of tokens before are the slot's, p at p % WIDTH."""
    new = tl.load(projected_ptr + channels, mask=is_there, other=0.0)
    total = new.to(tl.float32) * tl.load(conv_ptr + channels * WIDTH + WIDTH - 1, mask=is_there, other=0.0)
    for back in tl.static_range(1, WIDTH):
        before = position - back
        kept = tl.load(seen_ptr + before % WIDTH * CHANNELS + channels, mask=is_there & (before >= 0), other=0.0)
        weight = tl.load(conv_ptr + channels * WIDTH + WIDTH - 1 - back, mask=is_there, other=0.0)
        total += kept.to(tl.float32) * weight
    total = total.to(projected_ptr.dtype.element_ty).to(tl.float32)
    return total * tl.sigmoid(total), new


@triton.jit
def _convolve(
    projected_ptr,  # [rows, channels and more]
    conv_ptr,  # [CHANNELS, WIDTH]
    seen_ptr,  # [slots, WIDTH, CHANNELS]
    slots_ptr,  # i64[seqs], as the next two
    contexts_ptr,
    ends_ptr,
    mixed_ptr,  # [rows, CHANNELS]
    row_stride,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_TILE: tl.constexpr,  # power of two from WIDTH
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    seq = tl.program_id(0)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_channel = channels < CHANNELS
    wait(DEPENDENT)
    release(DEPENDENT)
    slot, start, length, position = begin(slots_ptr, contexts_ptr, ends_ptr, seq)
    projected = projected_ptr + start * row_stride + channels[None, :]
    seen = seen_ptr + slot * WIDTH * CHANNELS + channels[None, :]
    for first in range(0, length, TOKENS):
        tokens = first + tl.arange(0, TOKENS)
        is_token = (tokens < length)[:, None] & is_channel[None, :]
        total = tl.zeros((TOKENS, BLOCK), tl.float32)
        for back in tl.static_range(WIDTH):
            at = (tokens - back)[:, None]
            new = tl.load(projected + at * row_stride, mask=is_token & (at >= 0), other=0.0).to(tl.float32)
            is_kept = is_token & (at < 0) & (position + at >= 0)
            kept = tl.load(seen + (position + at) % WIDTH * CHANNELS, mask=is_kept, other=0.0).to(tl.float32)
            weight = tl.load(conv_ptr + channels * WIDTH + WIDTH - 1 - back, mask=is_channel, other=0.0)
            total += (new + kept) * weight.to(tl.float32)[None, :]
        total = total.to(mixed_ptr.dtype.element_ty).to(tl.float32)
        mixed = mixed_ptr + (start + tokens)[:, None] * CHANNELS + channels[None, :]
        tl.store(mixed, (total * tl.sigmoid(total)).to(mixed_ptr.dtype.element_ty), mask=is_token)
    # What is written below may be where a slower warp still reads above.
    tl.debug_barrier()
    offsets = tl.arange(0, WIDTH_TILE)
    last = (length - WIDTH + offsets)[:, None]
    is_last = (offsets < WIDTH)[:, None] & (last >= 0) & is_channel[None, :]
    new = tl.load(projected + last * row_stride, mask=is_last, other=0.0)
    tl.store(seen + (position + last) % WIDTH * CHANNELS, new, mask=is_last)


def convolve(projected: Tensor, conv: Tensor, seen: Tensor, sequences: Sequences) -> Tensor:
    """silu of the convolution `conv` [channels, width] of the first `channels` columns of `projected` [rows, more],
    all of whose rows are of `sequences` -> [rows, channels]; `seen` [slots, width, channels] is moved on.
    """
    channels, width = conv.shape
    mixed = projected.new_empty(len(projected), channels)
    dependent = has_dependent_launch(projected.device)
    _convolve[(len(sequences.slots), triton.cdiv(channels, _CHANNELS))](
        projected,
        conv,
        seen,
        sequences.slots,
        sequences.contexts,
        sequences.ends,
        mixed,
        projected.stride(0),
        CHANNELS=channels,
        WIDTH=width,
        WIDTH_TILE=triton.next_power_of_2(width),
        TOKENS=_TOKENS,
        BLOCK=_CHANNELS,
        DEPENDENT=dependent,
        **options(warps=4, dependent=dependent),
    )
    return mixed
