"""Logits of the tokens that a grammar leaves: those of all others are taken out, a bit a token."""

import triton
import triton.language as tl
from torch import Tensor

from worker_svc.core.kernels.launch import options
from worker_svc.core.kernels.sampling.changes import TokenMasks

_WORDS = 64  # of a program


@triton.jit
def _keep_masked(
    rows_ptr,  # i64[masks]
    words_ptr,  # i32[masks, WORDS]
    out_ptr,  # f32[rows, columns]
    num_columns,
    num_words,
    out_stride,
    BLOCK: tl.constexpr,
):
    mask = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + mask)
    words = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(words_ptr + mask * num_words + words, mask=words < num_words, other=0)
    places = tl.arange(0, 32)
    columns = words[:, None] * 32 + places[None, :]
    is_forbidden = ((bits[:, None] >> places[None, :]) & 1) == 0
    tl.store(out_ptr + row * out_stride + columns, float("-inf"), mask=is_forbidden & (columns < num_columns))


def keep_masked(logits: Tensor, masks: TokenMasks) -> None:
    """Forbid the tokens whose bits are not set in logits f32[rows, vocab_size], in place."""
    num_columns, num_words = logits.shape[1], masks.words.shape[1]
    _keep_masked[(len(masks.rows), triton.cdiv(num_words, _WORDS))](
        masks.rows,
        masks.words,
        logits,
        num_columns,
        num_words,
        logits.stride(0),
        BLOCK=_WORDS,
        **options(warps=4),
    )
