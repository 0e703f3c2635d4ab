"""Multiplier with integers of 4 bits on a Hopper: few rows by kernels that tables of tuning choose, which decode
numbers as they read them; many with the weight as floats, which is made for each product and is little beside it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from worker_svc.core.formats.dense import Dense
from worker_svc.core.formats.int4 import Int4, Int4Format
from worker_svc.core.kernels.linear.int4_rows import Int4Rows
from worker_svc.core.kernels.linear.int4_widening import can_widen, widen
from worker_svc.core.kernels.linear.norm import rms_norm
from worker_svc.core.kernels.linear.table import Choices, Line
from worker_svc.core.kernels.linear.ways import INT4, Cublas, Int4Tile, Kind, Product, Way
from worker_svc.core.operations.interface import Norm
from worker_svc.core.operations.multiplier import Multiplier

_HALF = (torch.bfloat16, torch.float16)


class Int4Multiplier:
    """Implement `Multiplier` of `Int4`; for use on one stream.

    Args:
        dense: multiplies with a weight that was widened.
        lines: of the tables for the device, in the order in which they count.
    """

    def __init__(self, dense: Multiplier, lines: Sequence[Line]) -> None:
        self._dense = dense
        self._choices = Choices(lines, (Int4Tile, Cublas))
        self._found: dict[tuple[Kind, int, int, int | None, int], Way] = {}
        self._rows = Int4Rows()

    def multiplies(self, form: Int4Format, outputs: int, inputs: int, dtype: torch.dtype) -> bool:
        """Return whether few rows have a kernel: to widen such a weight in each step would be slow."""
        way = self._way("plain", outputs, inputs, form.group, 1)
        return dtype in _HALF and isinstance(way, Int4Tile)

    def fold_norm(self, norm: Norm, packed: Int4, bias: Tensor | None) -> None:
        """Implement `Multiplier.fold_norm`: an integer has no room for it."""

    def of_normed(self, hidden: Tensor, norm: Norm, packed: Int4, bias: Tensor | None) -> Tensor | None:
        """Implement `Multiplier.of_normed`: of one row. Several would be normed by each program again."""
        way = self._way_of("normed", packed, hidden)
        if not isinstance(way, Int4Tile) or not _takes_norm(hidden):
            return None
        return self._rows.multiply(hidden.contiguous(), packed, way, norm=(norm.weight, norm.eps), bias=bias)

    def gated(
        self, hidden: Tensor, norm: Norm | None, packed: Int4, bias: Tensor | None, *, is_gelu: bool = False
    ) -> Tensor | None:
        """Implement `Multiplier.gated`."""
        way = self._way_of("gated", packed, hidden)
        if not isinstance(way, Int4Tile) or bias is not None or is_gelu:
            return None
        rows = hidden.contiguous()
        if norm is None:
            return self._rows.multiply(rows, packed, way, is_gated=True)
        if _takes_norm(rows):
            return self._rows.multiply(rows, packed, way, norm=(norm.weight, norm.eps), is_gated=True)
        return self._rows.multiply(rms_norm(rows, norm.weight, norm.eps), packed, way, is_gated=True)

    def multiply(self, x: Tensor, packed: Int4, bias: Tensor | None) -> Tensor:
        """Implement `Multiplier.multiply`."""
        way = self._way_of("plain" if bias is None else "biased", packed, x)
        if isinstance(way, Int4Tile):
            return self._rows.multiply(x.contiguous(), packed, way, bias=bias)
        if not can_widen(packed, x.dtype):
            return packed.multiply(x, bias)
        return self._dense.multiply(x, Dense(widen(packed, x.dtype)), bias)

    def add(self, x: Tensor, packed: Int4, bias: Tensor | None, residual: Tensor) -> Tensor:
        """Implement `Multiplier.add`."""
        way = self._way_of("added", packed, x)
        if isinstance(way, Int4Tile):
            return self._rows.multiply(x.contiguous(), packed, way, bias=bias, residual=residual)
        if not can_widen(packed, x.dtype):
            return residual.add_(packed.multiply(x, bias))
        return self._dense.add(x, Dense(widen(packed, x.dtype)), bias, residual)

    def _way_of(self, kind: Kind, packed: Int4, x: Tensor) -> Way | None:
        """None: kernels have no such numbers."""
        return self._way(kind, packed.outputs, packed.inputs, packed.group, len(x)) if x.dtype in _HALF else None

    def _way(self, kind: Kind, outputs: int, inputs: int, group: int | None, rows: int) -> Way:
        key = kind, outputs, inputs, group, rows
        way = self._found.get(key)
        if way is None:
            way = self._found[key] = self._choices.find(Product(kind, outputs, inputs, INT4, group), rows)
        return way


def _takes_norm(hidden: Tensor) -> bool:
    """Return whether the kernel norms these rows; before they are scaled they may be too large for fp16."""
    return len(hidden) == 1 and hidden.dtype is torch.bfloat16
