"""Root mean square norm of many rows."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker_svc.core.kernels.launch import has_dependent_launch, options, release, wait


@triton.jit
def _rms_norm(x_ptr, weight_ptr, out_ptr, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_column = columns < SIZE
    weight = tl.load(weight_ptr + columns, mask=is_column, other=0.0).to(tl.float32)
    wait(DEPENDENT)
    release(DEPENDENT)
    x = tl.load(x_ptr + row * SIZE + columns, mask=is_column, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x) / SIZE + eps)
    tl.store(out_ptr + row * SIZE + columns, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=is_column)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [rows, size], contiguous -> like x; squares are summed in fp32."""
    out = torch.empty_like(x)
    size = x.shape[1]
    dependent = has_dependent_launch(x.device)
    _rms_norm[(len(x),)](
        x,
        weight,
        out,
        eps,
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        DEPENDENT=dependent,
        **options(warps=4, dependent=dependent),
    )
    return out
