"""Kernels of integers of 4 bits, as `GroupedMultiplier` takes them."""

import torch
from torch import Tensor

from worker_svc.core.formats.int4 import Int4
from worker_svc.core.kernels.linear.int4_rows import Int4Rows
from worker_svc.core.kernels.linear.int4_widening import can_widen, widen
from worker_svc.core.kernels.linear.ways import INT4, Int4Tile
from worker_svc.core.operations.interface import Norm


class Int4Kernels:
    """Implement `GroupedKernels` of `Int4`; for use on one stream."""

    name = INT4
    ways = (Int4Tile,)

    def __init__(self) -> None:
        self._rows = Int4Rows()

    def takes_norm(self, rows: Tensor) -> bool:
        """Implement `GroupedKernels.takes_norm`: of one. Several would be normed by each program again, and before rows
        are scaled they may be too large for fp16.
        """
        return len(rows) == 1 and rows.dtype is torch.bfloat16

    def takes_gate(self, bias: Tensor | None, *, is_gelu: bool) -> bool:
        """Implement `GroupedKernels.takes_gate`."""
        return bias is None and not is_gelu

    def multiply(
        self,
        rows: Tensor,
        packed: Int4,
        way: Int4Tile,
        *,
        norm: Norm | None = None,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        is_gated: bool = False,
        is_gelu: bool = False,
    ) -> Tensor:
        """Implement `GroupedKernels.multiply`."""
        assert not is_gelu, "no product takes it along"
        scaling = None if norm is None else (norm.weight, norm.eps)
        return self._rows.multiply(rows, packed, way, norm=scaling, bias=bias, residual=residual, is_gated=is_gated)

    def can_widen(self, packed: Int4, dtype: torch.dtype) -> bool:
        """Implement `GroupedKernels.can_widen`."""
        return can_widen(packed, dtype)

    def widen(self, packed: Int4, dtype: torch.dtype) -> Tensor:
        """Implement `GroupedKernels.widen`."""
        return widen(packed, dtype)
