"""The gate of the feed-forward block."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker_svc.core.kernels.launch import has_dependent_launch, options, release, wait
from worker_svc.core.kernels.norm import row_scale
from worker_svc.core.operations.interface import Unscaled

_BLOCK, _WIDE_BLOCK = 1024, 2048
_SOME_ROWS = 128  # beyond these, and below many, blocks are wide, so that fewer programs find the scale of a row
_MANY_ROWS = 1024  # from here on a program does a whole row, and finds its scale once


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
    DEPENDENT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * length + tl.arange(0, BLOCK)
    gates = x_ptr + row * 2 * size + columns
    outs = out_ptr + row * size + columns
    wait(DEPENDENT)
    release(DEPENDENT)
    # Gates and ups are on their way while the scale is found, and the next ones while these are written.
    is_column = columns < size
    gate = tl.load(gates, mask=is_column, other=0.0)
    up = tl.load(gates + size, mask=is_column, other=0.0)
    scale = row_scale(hidden_ptr + row * hidden_size, hidden_eps, hidden_size)
    for start in range(0, length, BLOCK):
        is_next = (columns + start + BLOCK < size) & (start + BLOCK < length)
        next_gate = tl.load(gates + start + BLOCK, mask=is_next, other=0.0)
        next_up = tl.load(gates + size + start + BLOCK, mask=is_next, other=0.0)
        scaled = gate.to(tl.float32) * scale
        gated = scaled * tl.sigmoid(scaled) * (up.to(tl.float32) * scale)
        tl.store(outs + start, gated.to(out_ptr.dtype.element_ty), mask=columns + start < size)
        gate, up = next_gate, next_up


def silu_mul(gate_up: Tensor, unscaled: Unscaled | None = None) -> Tensor:
    """silu(gate) * up: [rows, 2 * size], gates then ups, contiguous -> [rows, size]; `unscaled`: of the rows given."""
    rows, size = len(gate_up), gate_up.shape[1] // 2
    out = torch.empty(rows, size, dtype=gate_up.dtype, device=gate_up.device)
    dependent = has_dependent_launch(gate_up.device)
    block = _WIDE_BLOCK if _SOME_ROWS < rows < _MANY_ROWS else _BLOCK
    length = block * (triton.cdiv(size, block) if rows >= _MANY_ROWS else 1)
    _silu_mul[(rows, triton.cdiv(size, length))](
        gate_up,
        unscaled.hidden if unscaled is not None else gate_up,
        out,
        unscaled.eps if unscaled is not None else 0.0,
        unscaled.hidden.shape[1] if unscaled is not None else 0,
        size,
        length,
        BLOCK=block,
        DEPENDENT=dependent,
        **options(warps=4, dependent=dependent),
    )
    return out
