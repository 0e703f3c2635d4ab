"""The gate of the feed-forward block."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker_svc.core.kernels.launch import has_dependent_launch, options, release, wait

_BLOCK = 1024


@triton.jit
def _silu_mul(x_ptr, out_ptr, size, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < size
    wait(DEPENDENT)
    release(DEPENDENT)
    gate = tl.load(x_ptr + row * 2 * size + columns, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * size + size + columns, mask=is_column, other=0.0).to(tl.float32)
    gated = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + row * size + columns, gated.to(out_ptr.dtype.element_ty), mask=is_column)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up: [rows, 2 * size], gates then ups, contiguous -> [rows, size]."""
    rows, size = len(gate_up), gate_up.shape[1] // 2
    out = torch.empty(rows, size, dtype=gate_up.dtype, device=gate_up.device)
    dependent = has_dependent_launch(gate_up.device)
    _silu_mul[(rows, triton.cdiv(size, _BLOCK))](
        gate_up, out, size, BLOCK=_BLOCK, DEPENDENT=dependent, **options(warps=4, dependent=dependent)
    )
    return out
