"""Kernels of 8-bit floats with scales for groups of inputs, as `GroupedMultiplier` takes them."""

import torch
from torch import Tensor

from worker_svc.core.formats.fp8_groups import Fp8Groups
from worker_svc.core.kernels.linear.fp8_few_rows import Fp8FewRows
from worker_svc.core.kernels.linear.fp8_one_row import fp8_row_linear
from worker_svc.core.kernels.linear.fp8_widening import can_widen, widen
from worker_svc.core.kernels.linear.norm import rms_norm
from worker_svc.core.kernels.linear.product import FP8_GROUPS
from worker_svc.core.kernels.linear.ways import Fp8FewRowsTile, Fp8OneRowTile
from worker_svc.core.operations.interface import Norm


class Fp8GroupKernels:
    """Implement `GroupedKernels` of `Fp8Groups`; for use on one stream."""

    name = FP8_GROUPS
    ways = (Fp8OneRowTile, Fp8FewRowsTile)

    def __init__(self) -> None:
        self._few_rows = Fp8FewRows()

    def takes_norm(self, rows: Tensor) -> bool:
        """Implement `GroupedKernels.takes_norm`: of one. Several are normed by a kernel of their own in any case."""
        return len(rows) == 1

    def takes_gate(self, bias: Tensor | None, *, is_gelu: bool) -> bool:  # noqa: ARG002
        """Implement `GroupedKernels.takes_gate`."""
        return True

    def multiply(
        self,
        rows: Tensor,
        packed: Fp8Groups,
        way: Fp8OneRowTile | Fp8FewRowsTile,
        *,
        norm: Norm | None = None,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        is_gated: bool = False,
        is_gelu: bool = False,
    ) -> Tensor:
        """Implement `GroupedKernels.multiply`."""
        if isinstance(way, Fp8OneRowTile):
            return fp8_row_linear(
                rows,
                packed.weight,
                packed.scales,
                way,
                rounds_inputs=False,
                group=packed.group,
                norm=None if norm is None else (norm.weight, norm.eps),
                bias=bias,
                residual=residual,
                is_gated=is_gated,
                gelu=is_gelu,
            )
        if norm is not None:  # as `Fp8FewRows` takes one row, too
            rows = rms_norm(rows, norm.weight, norm.eps)
        return self._few_rows.multiply(
            rows,
            None,
            packed.weight,
            packed.scales,
            way,
            rows.dtype,
            group=packed.group,
            bias=bias,
            residual=residual,
            is_gated=is_gated,
            gelu=is_gelu,
        )

    def can_widen(self, packed: Fp8Groups, dtype: torch.dtype) -> bool:  # noqa: ARG002
        """Implement `GroupedKernels.can_widen`."""
        return can_widen(packed)

    def widen(self, packed: Fp8Groups, dtype: torch.dtype) -> Tensor:
        """Implement `GroupedKernels.widen`."""
        return widen(packed, dtype)
