"""Multiplier with weights in half precision on CUDA: one row goes through matrix-vector kernels that take the norm, the
gate and the residual along; a few rows through products that are cut along the inputs, where the weight is small; some
more, on a Hopper, through products that take the gate or the residual along and begin beside the kernel before; most
through cuBLAS, or through a package that takes the gate along, where that is there and better.
"""

import torch
from torch import Tensor

from worker_svc.core.formats.dense import Dense
from worker_svc.core.kernels.linear.batch_cut import ProductCut, find_cut, find_gated_cut
from worker_svc.core.kernels.linear.batch_rows import BatchLinear, has_batch_linear
from worker_svc.core.kernels.linear.few_rows import FewRows, Tiling
from worker_svc.core.kernels.linear.few_rows import tiling as find_tiling
from worker_svc.core.kernels.linear.many_rows import ManyRows
from worker_svc.core.kernels.linear.many_tiles import Tile, find_gated_tile, find_tile
from worker_svc.core.kernels.linear.one_row import fits_row_linear, row_linear
from worker_svc.core.operations.cublas import LibraryFor, add_product
from worker_svc.core.operations.interface import Norm


class DenseMultiplier:
    """Implement `Multiplier`; for use on one stream."""

    def __init__(self) -> None:
        self._few_rows = FewRows()
        self._batch = BatchLinear()
        self.many_rows: ManyRows | None = None  # where there is one

    def fold_norm(self, norm: Norm, packed: Dense, bias: Tensor | None) -> None:
        """Implement `Multiplier.fold_norm`. What is not scaled may be too large for fp16, and a bias has its scale."""
        if bias is None and packed.weight.dtype is torch.bfloat16:
            norm.fold(packed.weight)

    def of_normed_row(self, hidden: Tensor, norm: Norm, packed: Dense, bias: Tensor | None) -> Tensor | None:
        """Implement `Multiplier.of_normed_row`."""
        if not fits_row_linear(packed.weight):
            return None
        scaling = norm.weight, norm.eps
        return row_linear(hidden, packed.weight, norm=scaling, is_folded=norm.is_folded, bias=bias)

    def gated(self, hidden: Tensor, norm: Norm | None, packed: Dense, bias: Tensor | None) -> Tensor | None:
        """Implement `Multiplier.gated`."""
        weight = packed.weight
        if norm is None or bias is not None:
            return None
        if len(hidden) == 1 and fits_row_linear(weight):
            return row_linear(hidden, weight, norm=(norm.weight, norm.eps), is_folded=norm.is_folded, is_gated=True)
        if not norm.is_folded or not _fits(hidden, weight):
            return None
        outputs, inputs = weight.shape
        if self.many_rows is not None and (tile := find_gated_tile(outputs, inputs, len(hidden))) is not None:
            return self.many_rows.gate(hidden, weight, tile, norm.eps)
        if (cut := find_gated_cut(outputs, inputs, len(hidden))) is not None:
            return self._batch.gate(hidden, weight, cut, norm.eps)
        return None

    def multiply(self, x: Tensor, packed: Dense, bias: Tensor | None) -> Tensor:
        """Implement `Multiplier.multiply`."""
        weight = packed.weight
        if bias is None:
            if self.many_rows is not None and (tile := self._tile(x, weight, is_added=False)) is not None:
                return self.many_rows.multiply(x, weight, tile)
            if (cut := self._batch_cut(x, weight)) is not None:
                return self._batch.multiply(x, weight, cut)
            if (tiling := self._tiling(x, weight)) is not None:
                return self._few_rows.multiply(x, weight, tiling)
        with LibraryFor(weight):
            return packed.multiply(x, bias)

    def add(self, x: Tensor, packed: Dense, bias: Tensor | None, residual: Tensor) -> Tensor:
        """Implement `Multiplier.add`."""
        weight = packed.weight
        if len(x) == 1 and fits_row_linear(weight):
            return row_linear(x, weight, bias=bias, residual=residual)
        if bias is not None:
            residual.add_(bias)
        if self.many_rows is not None and (tile := self._tile(x, weight, is_added=True)) is not None:
            return self.many_rows.multiply(x, weight, tile, residual)
        if (cut := self._batch_cut(x, weight)) is not None:
            return self._batch.multiply(x, weight, cut, residual)
        if (tiling := self._tiling(x, weight)) is not None:
            return self._few_rows.multiply(x, weight, tiling, residual)
        return add_product(residual, x, weight)

    def _tiling(self, x: Tensor, weight: Tensor) -> Tiling | None:
        outputs, inputs = weight.shape
        return find_tiling(outputs, inputs, len(x)) if 1 < len(x) <= FewRows.MAX_ROWS else None

    def _batch_cut(self, x: Tensor, weight: Tensor) -> ProductCut | None:
        outputs, inputs = weight.shape
        return find_cut(outputs, inputs, len(x)) if _fits(x, weight) else None

    def _tile(self, x: Tensor, weight: Tensor, *, is_added: bool) -> Tile | None:
        outputs, inputs = weight.shape
        return find_tile(outputs, inputs, len(x), is_added=is_added) if _fits(x, weight) else None


def _fits(x: Tensor, weight: Tensor) -> bool:
    return weight.dtype is torch.bfloat16 and has_batch_linear(x.device)
