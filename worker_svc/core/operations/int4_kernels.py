"""Kernels of integers of 4 bits, as `GroupedMultiplier` takes them."""

import torch
from torch import Tensor

from worker_svc.core.formats.int4 import Int4
from worker_svc.core.kernels.linear.int4_rows import Int4Rows
from worker_svc.core.kernels.linear.int4_stream import has_int4_stream, multiply_int4_stream
from worker_svc.core.kernels.linear.int4_widening import can_widen, widen
from worker_svc.core.kernels.linear.product import INT4
from worker_svc.core.kernels.linear.ways import Int4StreamTile, Int4Tile
from worker_svc.core.operations.interface import Norm


class Int4Kernels:
    """Implement `GroupedKernels` of `Int4`; for use on one stream."""

    name = INT4

    def __init__(self, device: torch.device) -> None:
        self.ways: tuple[type, ...] = (Int4Tile, Int4StreamTile) if has_int4_stream(device) else (Int4Tile,)
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
        way: Int4Tile | Int4StreamTile,
        *,
        norm: Norm | None = None,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        is_gated: bool = False,
        is_gelu: bool = False,
    ) -> Tensor:
        """Implement `GroupedKernels.multiply`."""
        assert not is_gelu, "no product takes it along"
        if isinstance(way, Int4StreamTile):
            assert norm is None, "rows are normed before"
            return multiply_int4_stream(rows, packed, way, bias=bias, residual=residual, is_gated=is_gated)
        scaling = None if norm is None else (norm.weight, norm.eps)
        return self._rows.multiply(rows, packed, way, norm=scaling, bias=bias, residual=residual, is_gated=is_gated)

    def can_widen(self, packed: Int4, dtype: torch.dtype) -> bool:
        """Implement `GroupedKernels.can_widen`."""
        return can_widen(packed, dtype)

    def widen(self, packed: Int4, dtype: torch.dtype) -> Tensor:
        """Implement `GroupedKernels.widen`."""
        return widen(packed, dtype)
