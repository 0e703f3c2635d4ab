"""Fused kernels for half precision on CUDA: one row goes through matrix-vector kernels that take the norm, the gate and
the residual along; a few rows through products that are cut along the inputs, where the weight is small; some more, on
a Hopper, through products that take the gate or the residual along and begin beside the kernel before; most through
cuBLAS, with the gate as a kernel of its own, or through a package that takes it along, where that is there and better.
Of a norm, the weight is folded into the product behind it, and the scale of each row is left to the kernel behind that.
"""

import torch
from torch import Tensor

from worker_svc.core.kernels.activation import silu_mul
from worker_svc.core.kernels.batch_cut import Cut, find_cut, find_gated_cut
from worker_svc.core.kernels.batch_linear import BatchLinear, has_batch_linear
from worker_svc.core.kernels.few_rows import FewRows, Tiling
from worker_svc.core.kernels.few_rows import tiling as find_tiling
from worker_svc.core.kernels.linear import fits_row_linear, row_linear
from worker_svc.core.kernels.many_rows import ManyRows
from worker_svc.core.kernels.many_tiles import Tile, find_gated_tile, find_tile
from worker_svc.core.kernels.norm import rms_norm
from worker_svc.core.operations.cublas import LibraryFor, add_product
from worker_svc.core.operations.interface import Norm, Projection, Reduction, Unscaled


class TritonOperations:
    """See `Operations`; for use on one stream."""

    def __init__(self) -> None:
        self._few_rows = FewRows()
        self._batch = BatchLinear()
        self.many_rows: ManyRows | None = None  # where there is one

    def norm_linear(self, hidden: Tensor, norm: Norm, linear: Projection) -> Tensor:
        """See `Operations.norm_linear`."""
        if len(hidden) == 1 and fits_row_linear(linear.weight):
            weight, is_folded = linear.weight, norm.is_folded
            return row_linear(hidden, weight, norm=(norm.weight, norm.eps), is_folded=is_folded, bias=linear.bias)
        return self._multiply(rms_norm(hidden, norm.weight, norm.eps), linear)

    def fold_norm(self, norm: Norm, linear: Projection) -> None:
        """See `Operations.fold_norm`. What is not scaled yet may be too large for fp16, and a bias has its scale."""
        if linear.bias is None and linear.weight.dtype is torch.bfloat16:
            norm.fold(linear.weight)

    def norm_linear_unscaled(self, hidden: Tensor, norm: Norm, linear: Projection) -> tuple[Tensor, Unscaled | None]:
        """See `Operations.norm_linear_unscaled`."""
        # Among dependent launches a norm costs no more than to find its scale twice.
        if not norm.is_folded or len(hidden) <= FewRows.MAX_ROWS:
            return self.norm_linear(hidden, norm, linear), None
        return self._multiply(hidden, linear), Unscaled(hidden, norm.eps)

    def linear_add(self, x: Tensor, linear: Reduction, residual: Tensor) -> Tensor:
        """See `Operations.linear_add`."""
        if not linear.is_whole:
            return residual.add_(linear(x))
        if len(x) == 1 and fits_row_linear(linear.weight):
            return row_linear(x, linear.weight, bias=linear.bias, residual=residual)
        if linear.bias is not None:
            residual.add_(linear.bias)
        if self.many_rows is not None and (tile := self._tile(x, linear.weight, is_added=True)) is not None:
            return self.many_rows.multiply(x, linear.weight, tile, residual)
        if (cut := self._batch_cut(x, linear.weight)) is not None:
            return self._batch.multiply(x, linear.weight, cut, residual)
        if (tiling := self._tiling(x, linear.weight)) is not None:
            return self._few_rows.multiply(x, linear.weight, tiling, residual)
        return add_product(residual, x, linear.weight)

    def norm_gated(self, hidden: Tensor, norm: Norm, gate_up: Projection) -> Tensor:
        """See `Operations.norm_gated`."""
        if len(hidden) == 1 and gate_up.bias is None and fits_row_linear(gate_up.weight):
            scaled = norm.weight, norm.eps
            return row_linear(hidden, gate_up.weight, norm=scaled, is_folded=norm.is_folded, is_gated=True)
        if norm.is_folded and gate_up.bias is None and _fits(hidden, gate_up.weight):
            outputs, inputs = gate_up.weight.shape
            if self.many_rows is not None and (tile := find_gated_tile(outputs, inputs, len(hidden))) is not None:
                return self.many_rows.gate(hidden, gate_up.weight, tile, norm.eps)
            cut = find_gated_cut(outputs, inputs, len(hidden))
            if cut is not None:
                return self._batch.gate(hidden, gate_up.weight, cut, norm.eps)
        return silu_mul(*self.norm_linear_unscaled(hidden, norm, gate_up))

    def _multiply(self, x: Tensor, linear: Projection) -> Tensor:
        if linear.bias is None:
            if self.many_rows is not None and (tile := self._tile(x, linear.weight, is_added=False)) is not None:
                return self.many_rows.multiply(x, linear.weight, tile)
            if (cut := self._batch_cut(x, linear.weight)) is not None:
                return self._batch.multiply(x, linear.weight, cut)
            if (tiling := self._tiling(x, linear.weight)) is not None:
                return self._few_rows.multiply(x, linear.weight, tiling)
        with LibraryFor(linear.weight):
            return linear(x)

    def _tiling(self, x: Tensor, weight: Tensor) -> Tiling | None:
        outputs, inputs = weight.shape
        return find_tiling(outputs, inputs, len(x)) if 1 < len(x) <= FewRows.MAX_ROWS else None

    def _batch_cut(self, x: Tensor, weight: Tensor) -> Cut | None:
        outputs, inputs = weight.shape
        return find_cut(outputs, inputs, len(x)) if _fits(x, weight) else None

    def _tile(self, x: Tensor, weight: Tensor, *, is_added: bool) -> Tile | None:
        outputs, inputs = weight.shape
        return find_tile(outputs, inputs, len(x), is_added=is_added) if _fits(x, weight) else None


def _fits(x: Tensor, weight: Tensor) -> bool:
    return weight.dtype is torch.bfloat16 and has_batch_linear(x.device)
