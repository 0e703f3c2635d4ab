"""The gate of the feed-forward block."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker_svc.core.kernels.launch import has_dependent_launch, options, release, wait
from worker_svc.core.kernels.linear.norm import row_scale
from worker_svc.core.kernels.linear.unscaled import Unscaled

_BLOCK, _WIDE_BLOCK = 1024, 2048
_BLOCK_WARP = 256  # columns of a block, for each warp
_WIDE = 4096  # columns of a row from which on wide blocks are faster
_GELU_SCALE, _GELU_CUBE = tl.constexpr(1.5957691216057308), tl.constexpr(0.044715)  # 2 sqrt(2 / pi)
_SOME_ROWS, _MANY_ROWS = 65, 512
# From so many rows on a program does one of so many parts of a wide row: each finds the row's scale. On an H200 256
# rows of 16,896 columns and 4,352 hidden took 11.3 us with a program for each 1,024, and take 6.8; 512 of 12,288 and
# 4,096 took 10.6 in thirds, and take 9.1.
_PARTS = ((_MANY_ROWS, 1), (128, 2), (_SOME_ROWS, 3))


@triton.jit
def gated(gate, up, GELU: tl.constexpr):
    """silu(gate) * up, or GELU by tanh of the gate (Hendrycks and Gimpel, 2016)."""
    y = gate
    if GELU:
        # tanh(y) is 2 sigmoid(2 y) - 1, of which no term is too large for any y.
        y = _GELU_SCALE * (gate + _GELU_CUBE * gate * gate * gate)
    return gate * tl.sigmoid(y) * up


@triton.jit
def _silu_mul(
    x_ptr,  # [rows, 2 size]
    hidden_ptr,  # [rows, hidden_size]: rows of x are multiplied by 1 / rms of these
    out_ptr,  # [rows, size]
    hidden_eps,
    hidden_size,  # 0: they are scaled already
    size,
    length,  # columns of a program, a multiple of BLOCK
    BLOCK: tl.constexpr,
    GELU: tl.constexpr,  # else silu
    DEPENDENT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    wait(DEPENDENT)
    release(DEPENDENT)
    scale = row_scale(hidden_ptr + row * hidden_size, hidden_eps, hidden_size)
    for start in range(0, length, BLOCK):
        columns = tl.program_id(1) * length + start + tl.arange(0, BLOCK)
        is_column = columns < size
        gate = tl.load(x_ptr + row * 2 * size + columns, mask=is_column, other=0.0).to(tl.float32)
        up = tl.load(x_ptr + row * 2 * size + size + columns, mask=is_column, other=0.0).to(tl.float32)
        gate *= scale
        up *= scale
        values = gated(gate, up, GELU)
        tl.store(out_ptr + row * size + columns, values.to(out_ptr.dtype.element_ty), mask=is_column)


def silu_mul(gate_up: Tensor, unscaled: Unscaled | None = None, *, gelu: bool = False) -> Tensor:
    """silu(gate) * up: [rows, 2 * size], gates then ups, contiguous -> [rows, size]; `unscaled`: of the rows given;
    `gelu`: as `gated` has it.
    """
    rows, size = len(gate_up), gate_up.shape[1] // 2
    out = torch.empty(rows, size, dtype=gate_up.dtype, device=gate_up.device)
    dependent = has_dependent_launch(gate_up.device)
    block, length = _cut(rows, size)
    _silu_mul[(rows, triton.cdiv(size, length))](
        gate_up,
        unscaled.hidden if unscaled is not None else gate_up,
        out,
        unscaled.eps if unscaled is not None else 0.0,
        unscaled.hidden.shape[1] if unscaled is not None else 0,
        size,
        length,
        BLOCK=block,
        GELU=gelu,
        DEPENDENT=dependent,
        **options(warps=block // _BLOCK_WARP, dependent=dependent),
    )
    return out


def _cut(rows: int, size: int) -> tuple[int, int]:
    """The columns of a block, and of a program: whole blocks."""
    if rows < _SOME_ROWS or (size < _WIDE and rows < _MANY_ROWS):
        return _BLOCK, _BLOCK
    block = _WIDE_BLOCK if size >= _WIDE else _BLOCK
    parts = next(parts for fewest, parts in _PARTS if rows >= fewest)
    return block, triton.cdiv(size, parts * block) * block
