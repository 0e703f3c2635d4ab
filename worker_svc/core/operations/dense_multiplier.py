"""Multiplier with weights in half precision on CUDA: each product by the way that tables of tuning have for it. Kernels
for one row take the norm, the gate and the residual along; others the gate or the residual; cuBLAS takes nothing along.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from worker_svc.core.formats.dense import Dense
from worker_svc.core.kernels.linear.batch_rows import BatchRows, has_batch_rows
from worker_svc.core.kernels.linear.cublas import Library, add_product
from worker_svc.core.kernels.linear.few_rows import FewRows
from worker_svc.core.kernels.linear.many_rows import ManyRows
from worker_svc.core.kernels.linear.one_row import row_linear
from worker_svc.core.kernels.linear.product import Kind, Product
from worker_svc.core.kernels.linear.row_stream import has_row_stream, stream_row
from worker_svc.core.kernels.linear.table import Choices, Line
from worker_svc.core.kernels.linear.ways import (
    CUBLAS,
    BatchTile,
    Cublas,
    FewRowsTile,
    ManyRowsTile,
    OneRowTile,
    RowStreamTile,
    Way,
)
from worker_svc.core.operations.interface import Norm


class DenseMultiplier:
    """Implement `Multiplier`; for use on one stream.

    Args:
        device: what computes.
        lines: of the tables for it, in the order in which they count.
    """

    def __init__(self, device: torch.device, lines: Sequence[Line]) -> None:
        self.many_rows: ManyRows | None = None
        self._lines = lines
        self._has_batch_rows = has_batch_rows(device)
        self._has_row_stream = has_row_stream(device)
        self._few_rows = FewRows()
        self._batch_rows = BatchRows()
        self._choose()

    def use_many_rows(self, many_rows: ManyRows | None) -> None:
        """From now on a package multiplies where tables say so, or none."""
        self.many_rows = many_rows
        self._choose()

    @property
    def runnable(self) -> list[type]:
        """The types of ways that there are kernels for."""
        ways: list[type] = [OneRowTile, FewRowsTile, Cublas]
        if self._has_row_stream:
            ways.append(RowStreamTile)
        if self._has_batch_rows:
            ways.append(BatchTile)
        if self.many_rows is not None:
            ways.append(ManyRowsTile)
        return ways

    def _choose(self) -> None:
        self._choices = Choices(self._lines, self.runnable)
        self._found: dict[tuple[Kind, int, int, torch.dtype, int], Way] = {}

    def fold_norm(self, norm: Norm, packed: Dense, bias: Tensor | None) -> None:
        """Implement `Multiplier.fold_norm`. What is not scaled may be too large for fp16, and a bias has its scale."""
        if bias is None and packed.weight.dtype is torch.bfloat16:
            norm.fold(packed.weight)

    def of_normed(self, hidden: Tensor, norm: Norm, packed: Dense, bias: Tensor | None) -> Tensor | None:
        """Implement `Multiplier.of_normed`."""
        way = self._way("normed", packed.weight, len(hidden))
        return _of_row(hidden, packed.weight, way, norm=norm, bias=bias)

    def gated(
        self, hidden: Tensor, norm: Norm | None, packed: Dense, bias: Tensor | None, *, is_gelu: bool = False
    ) -> Tensor | None:
        """Implement `Multiplier.gated`."""
        weight = packed.weight
        if norm is None or bias is not None:
            return None
        way = self._way("gated", weight, len(hidden))
        product = _of_row(hidden, weight, way, norm=norm, is_gated=True, is_gelu=is_gelu)
        if product is not None or is_gelu or not norm.is_folded:
            return product
        if isinstance(way, ManyRowsTile) and self.many_rows is not None:
            return self.many_rows.gate(hidden, weight, way, norm.eps)
        return self._batch_rows.gate(hidden, weight, way, norm.eps) if isinstance(way, BatchTile) else None

    def multiply(self, x: Tensor, packed: Dense, bias: Tensor | None) -> Tensor:
        """Implement `Multiplier.multiply`."""
        way = self._way("plain" if bias is None else "biased", packed.weight, len(x))
        product = _of_row(x, packed.weight, way, bias=bias)
        if product is None:
            product = self._multiply(way, x, packed.weight, None if bias is None else bias.expand(len(x), -1))
        if product is not None:
            return product
        with Library(_library(way), packed.weight):
            return packed.multiply(x, bias)

    def add(self, x: Tensor, packed: Dense, bias: Tensor | None, residual: Tensor) -> Tensor:
        """Implement `Multiplier.add`."""
        way = self._way("added", packed.weight, len(x))
        total = _of_row(x, packed.weight, way, bias=bias, residual=residual)
        if total is not None:
            return total
        if bias is not None:
            residual.add_(bias)
        total = self._multiply(way, x, packed.weight, residual)
        return total if total is not None else add_product(residual, x, packed.weight, _library(way))

    def _multiply(self, way: Way, x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Tensor | None:
        """By a kernel; None: by cuBLAS."""
        if isinstance(way, ManyRowsTile) and self.many_rows is not None:
            return self.many_rows.multiply(x, weight, way, residual)
        if isinstance(way, BatchTile):
            return self._batch_rows.multiply(x, weight, way, residual)
        return self._few_rows.multiply(x, weight, way, residual) if isinstance(way, FewRowsTile) else None

    def _way(self, kind: Kind, weight: Tensor, rows: int) -> Way:
        outputs, inputs = weight.shape
        key = kind, outputs, inputs, weight.dtype, rows
        way = self._found.get(key)
        if way is None:
            product = Product(kind, outputs, inputs, str(weight.dtype).removeprefix("torch."))
            way = self._found[key] = self._choices.find(product, rows)
        return way


def _of_row(
    x: Tensor,
    weight: Tensor,
    way: Way,
    *,
    norm: Norm | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    is_gated: bool = False,
    is_gelu: bool = False,
) -> Tensor | None:
    """The product of one row; None: not by a kernel for one. What is gated has neither bias nor residual."""
    if isinstance(way, OneRowTile):
        multiply = partial(row_linear, x, weight, way)
    elif isinstance(way, RowStreamTile):
        multiply = partial(stream_row, x, weight, way)
    else:
        return None
    return multiply(
        norm=None if norm is None else (norm.weight, norm.eps),
        is_folded=norm is not None and norm.is_folded,
        bias=bias,
        residual=residual,
        is_gated=is_gated,
        is_gelu=is_gelu,
    )


def _library(way: Way) -> Cublas:
    return way if isinstance(way, Cublas) else CUBLAS
