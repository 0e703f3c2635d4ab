"""Multiplier with weights of 8-bit floats on CUDA: few rows by kernels that tables of tuning choose, which take norm,
gate, bias and residual along, many by torch's own product, or by cuBLASLt where that adds them to a residual. Rows are
rounded by a kernel, their norm with them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from worker_svc.core.formats.fp8_channel import Fp8Channel
from worker_svc.core.kernels.linear.batch_rows import BatchRows, RowScales, has_batch_rows
from worker_svc.core.kernels.linear.fp8_few_rows import Fp8FewRows
from worker_svc.core.kernels.linear.fp8_one_row import fp8_row_linear
from worker_svc.core.kernels.linear.fp8_rounding import round_gated, round_rows
from worker_svc.core.kernels.linear.fp8_sums import Fp8Sums
from worker_svc.core.kernels.linear.norm import rms_norm
from worker_svc.core.kernels.linear.product import FP8_W8A8, FP8_W8A16, Kind, Product
from worker_svc.core.kernels.linear.row_stream import has_row_stream, stream_row
from worker_svc.core.kernels.linear.table import Choices, Line
from worker_svc.core.kernels.linear.ways import Cublas, Fp8BatchTile, Fp8FewRowsTile, Fp8OneRowTile, RowStreamTile, Way
from worker_svc.core.operations.interface import Norm


class Fp8Multiplier:
    """Implement `Multiplier` of `Fp8Channel`; for use on one stream.

    Args:
        device: what computes.
        lines: of the tables for it, in the order in which they count.
    """

    def __init__(self, device: torch.device, lines: Sequence[Line]) -> None:
        kernels = [Fp8OneRowTile, Fp8FewRowsTile, Cublas]
        if has_row_stream(device):
            kernels.append(RowStreamTile)
        self._without_batch_rows = Choices(lines, kernels)
        self._choices = Choices(lines, [*kernels, Fp8BatchTile] if has_batch_rows(device) else kernels)
        self._found: dict[tuple[Kind, int, int, str, int, bool], Way] = {}
        self._few_rows = Fp8FewRows()
        self._batch_rows = BatchRows()
        self._sums = Fp8Sums(device)

    def fold_norm(self, norm: Norm, packed: Fp8Channel, bias: Tensor | None) -> None:
        """Implement `Multiplier.fold_norm`: what is rounded is not multiplied again."""

    def of_normed(self, hidden: Tensor, norm: Norm, packed: Fp8Channel, bias: Tensor | None) -> Tensor | None:
        """Implement `Multiplier.of_normed`."""
        return self._multiply("normed" if len(hidden) == 1 else _plain(bias), hidden, packed, bias, norm=norm)

    def gated(
        self, hidden: Tensor, norm: Norm | None, packed: Fp8Channel, bias: Tensor | None, *, is_gelu: bool = False
    ) -> Tensor | None:
        """Implement `Multiplier.gated`."""
        return self._by_kernel("gated", hidden, packed, bias, norm=norm, is_gelu=is_gelu)

    def multiply(self, x: Tensor, packed: Fp8Channel, bias: Tensor | None) -> Tensor:
        """Implement `Multiplier.multiply`."""
        product = self._multiply(_plain(bias), x, packed, bias)
        return packed.multiply(x, bias) if product is None else product

    def add(self, x: Tensor, packed: Fp8Channel, bias: Tensor | None, residual: Tensor) -> Tensor:
        """Implement `Multiplier.add`."""
        total = self._multiply("added", x, packed, bias, residual=residual)
        return residual.add_(packed.multiply(x, bias)) if total is None else total

    def add_gated(
        self, gate_up: Tensor, packed: Fp8Channel, bias: Tensor | None, residual: Tensor, *, is_gelu: bool
    ) -> Tensor | None:
        """residual + (silu(gate) * up) @ weight.T + bias, or gelu(gate) * up, in place of `residual`, where rows are
        rounded: gates with them. gate_up [rows, 2 * inputs], gates then ups, contiguous. None: by `add`.
        """
        if not packed.rounds_inputs or not len(gate_up):
            return None
        way = self._way("added", packed, len(gate_up))
        if isinstance(way, Fp8OneRowTile | RowStreamTile):  # which round by themselves
            return None
        rows, scales = round_gated(gate_up, gelu=is_gelu)
        if isinstance(way, Fp8FewRowsTile | Fp8BatchTile):
            return self._of_rows(way, rows, scales, packed, gate_up.dtype, bias=bias, residual=residual)
        return self._added(residual, rows, scales, packed, bias)

    def _multiply(
        self,
        kind: Kind,
        x: Tensor,
        packed: Fp8Channel,
        bias: Tensor | None,
        *,
        norm: Norm | None = None,
        residual: Tensor | None = None,
    ) -> Tensor | None:
        """None: no kernel of ours takes part."""
        product = self._by_kernel(kind, x, packed, bias, norm=norm, residual=residual)
        if product is not None:
            return product
        if not packed.rounds_inputs or not len(x):
            return None
        rounded, scales = round_rows(x.contiguous(), _scaling(norm))
        if residual is not None:
            return self._added(residual, rounded, scales, packed, bias)
        return packed.multiply_rounded(rounded, scales, bias, x.dtype)

    def _added(self, residual: Tensor, rows: Tensor, scales: Tensor, packed: Fp8Channel, bias: Tensor | None) -> Tensor:
        """The product of rounded rows, in place of `residual`."""
        total = self._sums.add(residual, rows, scales, packed.weight, packed.scales) if bias is None else None
        return residual.add_(packed.multiply_rounded(rows, scales, bias, residual.dtype)) if total is None else total

    def _by_kernel(
        self,
        kind: Kind,
        x: Tensor,
        packed: Fp8Channel,
        bias: Tensor | None,
        *,
        norm: Norm | None = None,
        residual: Tensor | None = None,
        is_gelu: bool = False,
    ) -> Tensor | None:
        """None: tables have none for so many rows."""
        is_gated = kind == "gated"
        way = self._way(kind, packed, len(x), in_batch=not (is_gated and (is_gelu or bias is not None)))
        if isinstance(way, Fp8OneRowTile):
            return fp8_row_linear(
                x,
                packed.weight,
                packed.scales,
                way,
                rounds_inputs=packed.rounds_inputs,
                norm=_scaling(norm),
                bias=bias,
                residual=residual,
                is_gated=is_gated,
                gelu=is_gelu,
            )
        if isinstance(way, RowStreamTile):
            return stream_row(
                x,
                packed.weight,
                way,
                scales=packed.scales,
                norm=_scaling(norm),
                bias=bias,
                residual=residual,
                is_gated=is_gated,
                is_gelu=is_gelu,
            )
        if not isinstance(way, Fp8FewRowsTile | Fp8BatchTile):
            return None
        rows, row_scales = x.contiguous(), None
        if packed.rounds_inputs:
            rows, row_scales = round_rows(rows, _scaling(norm))
        elif norm is not None:
            rows = rms_norm(rows, norm.weight, norm.eps)
        return self._of_rows(
            way, rows, row_scales, packed, x.dtype, bias=bias, residual=residual, is_gated=is_gated, is_gelu=is_gelu
        )

    def _of_rows(
        self,
        way: Fp8FewRowsTile | Fp8BatchTile,
        rows: Tensor,
        row_scales: Tensor | None,
        packed: Fp8Channel,
        dtype: torch.dtype,
        *,
        bias: Tensor | None,
        residual: Tensor | None,
        is_gated: bool = False,
        is_gelu: bool = False,
    ) -> Tensor:
        """The product of rows that are rounded, if they are to be, and normed."""
        weight, scales = packed.weight, packed.scales
        if isinstance(way, Fp8FewRowsTile):
            return self._few_rows.multiply(
                rows,
                row_scales,
                weight,
                scales,
                way,
                dtype,
                bias=bias,
                residual=residual,
                is_gated=is_gated,
                gelu=is_gelu,
            )
        assert row_scales is not None, "`Fp8BatchTile` fits rounded rows alone"
        if bias is not None:
            residual = bias.expand(len(rows), -1) if residual is None else residual.add_(bias)
        both = RowScales(row_scales, scales)
        return self._batch_rows.multiply_fp8(rows, weight, both, way, dtype, residual, is_gated=is_gated)

    def _way(self, kind: Kind, packed: Fp8Channel, rows: int, *, in_batch: bool = True) -> Way:
        """`in_batch`: `BatchRows` may compute it, which knows neither gelu nor biases of gates."""
        dtype = FP8_W8A8 if packed.rounds_inputs else FP8_W8A16
        key = kind, packed.outputs, packed.inputs, dtype, rows, in_batch
        way = self._found.get(key)
        if way is None:
            choices = self._choices if in_batch else self._without_batch_rows
            way = self._found[key] = choices.find(Product(*key[:4]), rows)
        return way


def _plain(bias: Tensor | None) -> Kind:
    return "plain" if bias is None else "biased"


def _scaling(norm: Norm | None) -> tuple[Tensor, float] | None:
    return None if norm is None else (norm.weight, norm.eps)
