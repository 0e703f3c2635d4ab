"""Multiplier with weights of 4-bit integers on CUDA: kernels that tables of tuning choose, and for many rows cuBLAS,
with the weight widened for each product.
"""

from collections.abc import Sequence

import torch.nn.functional as F  # noqa: N812  (the name that torch's own documentation uses)
from torch import Tensor

from worker_svc.core.formats.int4 import Int4
from worker_svc.core.kernels.linear.int4_rows import Int4Rows
from worker_svc.core.kernels.linear.int4_widening import widen
from worker_svc.core.kernels.linear.norm import rms_norm
from worker_svc.core.kernels.linear.table import Choices, Line
from worker_svc.core.kernels.linear.ways import Int4Tile, Kind, Product, Way
from worker_svc.core.operations.interface import Norm


class Int4Multiplier:
    """Implement `Multiplier` of `Int4`; for use on one stream.

    Args:
        lines: of the tables for the device, in the order in which they count.
    """

    def __init__(self, lines: Sequence[Line]) -> None:
        self._choices = Choices(lines, (Int4Tile,))
        self._found: dict[tuple[Kind, int, int, str, int | None, int], Way] = {}
        self._rows = Int4Rows()

    def fold_norm(self, norm: Norm, packed: Int4, bias: Tensor | None) -> None:
        """Implement `Multiplier.fold_norm`: integers are not multiplied by a weight."""

    def of_normed(self, hidden: Tensor, norm: Norm, packed: Int4, bias: Tensor | None) -> Tensor | None:
        """Implement `Multiplier.of_normed`."""
        way = self._way("normed", hidden, packed)
        if not isinstance(way, Int4Tile):
            return None
        return self._rows.multiply(hidden.contiguous(), packed, way, norm=(norm.weight, norm.eps), bias=bias)

    def gated(
        self, hidden: Tensor, norm: Norm | None, packed: Int4, bias: Tensor | None, *, is_gelu: bool = False
    ) -> Tensor | None:
        """Implement `Multiplier.gated`."""
        way = self._way("gated", hidden, packed)
        if is_gelu or bias is not None or not isinstance(way, Int4Tile):
            return None
        rows, scaling = hidden.contiguous(), None
        if norm is not None and len(rows) <= way.rows:
            scaling = norm.weight, norm.eps
        elif norm is not None:
            rows = rms_norm(rows, norm.weight, norm.eps)
        return self._rows.multiply(rows, packed, way, norm=scaling, is_gated=True)

    def multiply(self, x: Tensor, packed: Int4, bias: Tensor | None) -> Tensor:
        """Implement `Multiplier.multiply`."""
        way = self._way("plain" if bias is None else "biased", x, packed)
        if isinstance(way, Int4Tile):
            return self._rows.multiply(x.contiguous(), packed, way, bias=bias)
        return F.linear(x, widen(packed, x.dtype, 0, packed.outputs), bias)

    def add(self, x: Tensor, packed: Int4, bias: Tensor | None, residual: Tensor) -> Tensor:
        """Implement `Multiplier.add`."""
        way = self._way("added", x, packed)
        if isinstance(way, Int4Tile):
            return self._rows.multiply(x.contiguous(), packed, way, bias=bias, residual=residual)
        return residual.add_(F.linear(x, widen(packed, x.dtype, 0, packed.outputs), bias))

    def _way(self, kind: Kind, x: Tensor, packed: Int4) -> Way:
        dtype, group = str(x.dtype).removeprefix("torch."), packed.group or packed.inputs
        key = kind, packed.outputs, packed.inputs, dtype, group, len(x)
        way = self._found.get(key)
        if way is None:
            way = self._found[key] = self._choices.find(Product(*key[:5]), len(x))
        return way
