"""Multiplier of weights that have scales for groups of inputs, on a Hopper: few rows by kernels that tables of tuning
choose, which decode numbers as they read them; many with the weight as floats, which is made for each product and is
little beside it.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from worker_svc.core.formats.dense import Dense
from worker_svc.core.kernels.linear.norm import rms_norm
from worker_svc.core.kernels.linear.product import Kind, Product
from worker_svc.core.kernels.linear.table import Choices, Line
from worker_svc.core.kernels.linear.ways import Cublas, Way
from worker_svc.core.operations.interface import Norm
from worker_svc.core.operations.multiplier import Multiplier

_HALF = (torch.bfloat16, torch.float16)
_FEW_ROWS = (1, 2)


class Grouped(Protocol):
    """A type of `Packed` with scales for groups of inputs."""

    @property
    def outputs(self) -> int:
        """Implement `Packed.outputs`."""

    @property
    def inputs(self) -> int:
        """Implement `Packed.inputs`."""

    @property
    def group(self) -> int | None:
        """Inputs that share a scale; None: all."""

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Implement `Packed.multiply`."""


class GroupedKernels(Protocol):
    """The kernels of one type of `Grouped` (the arguments called `packed` are of it)."""

    @property
    def name(self) -> str:
        """The name of its weights in tables."""

    @property
    def ways(self) -> tuple[type, ...]:
        """Those of few rows."""

    def takes_norm(self, rows: Tensor) -> bool:
        """Return whether a product with these rows can be asked for their norm, too."""

    def takes_gate(self, bias: Tensor | None, *, is_gelu: bool) -> bool:
        """Return whether a product can be asked for such gates, too."""

    def multiply(
        self,
        rows: Tensor,
        packed: Any,
        way: Any,
        *,
        norm: Norm | None = None,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        is_gated: bool = False,
        is_gelu: bool = False,
    ) -> Tensor:
        """residual + f(norm(rows) @ weight.T + bias) by one of `ways`, f that of gates; like `rows` otherwise."""

    def can_widen(self, packed: Any, dtype: torch.dtype) -> bool:
        """Return whether `widen` has such a weight."""

    def widen(self, packed: Any, dtype: torch.dtype) -> Tensor:
        """The weight, rounded once, [outputs, inputs]."""


class GroupedMultiplier:
    """Implement `Multiplier` of one type of `Grouped`; for use on one stream.

    Args:
        kernels: of the type.
        dense: multiplies with a weight that was widened.
        lines: of the tables for the device, in the order in which they count.
    """

    def __init__(self, kernels: GroupedKernels, dense: Multiplier, lines: Sequence[Line]) -> None:
        self._kernels = kernels
        self._dense = dense
        self._choices = Choices(lines, (*kernels.ways, Cublas))
        self._found: dict[tuple[Kind, int, int, int | None, int], Way] = {}

    def multiplies(self, group: int | None, outputs: int, inputs: int, dtype: torch.dtype) -> bool:
        """Return whether one row and a few have a kernel: to widen such a weight in each step would be slow."""
        ways = (self._way("plain", outputs, inputs, group, rows) for rows in _FEW_ROWS)
        return dtype in _HALF and all(isinstance(way, self._kernels.ways) for way in ways)

    def fold_norm(self, norm: Norm, packed: Grouped, bias: Tensor | None) -> None:
        """Implement `Multiplier.fold_norm`: stored numbers have no room for it."""

    def of_normed(self, hidden: Tensor, norm: Norm, packed: Grouped, bias: Tensor | None) -> Tensor | None:
        """Implement `Multiplier.of_normed`."""
        way = self._way_of("normed", packed, hidden)
        if way is None or not self._kernels.takes_norm(hidden):
            return None
        return self._kernels.multiply(hidden.contiguous(), packed, way, norm=norm, bias=bias)

    def gated(
        self, hidden: Tensor, norm: Norm | None, packed: Grouped, bias: Tensor | None, *, is_gelu: bool = False
    ) -> Tensor | None:
        """Implement `Multiplier.gated`."""
        way = self._way_of("gated", packed, hidden)
        if way is None or not self._kernels.takes_gate(bias, is_gelu=is_gelu):
            return None
        rows = hidden.contiguous()
        if norm is not None and not self._kernels.takes_norm(rows):
            rows, norm = rms_norm(rows, norm.weight, norm.eps), None
        return self._kernels.multiply(rows, packed, way, norm=norm, bias=bias, is_gated=True, is_gelu=is_gelu)

    def multiply(self, x: Tensor, packed: Grouped, bias: Tensor | None) -> Tensor:
        """Implement `Multiplier.multiply`."""
        way = self._way_of("plain" if bias is None else "biased", packed, x)
        if way is not None:
            return self._kernels.multiply(x.contiguous(), packed, way, bias=bias)
        if not self._can_widen(packed, x.dtype):
            return packed.multiply(x, bias)
        return self._dense.multiply(x, Dense(self._kernels.widen(packed, x.dtype)), bias)

    def add(self, x: Tensor, packed: Grouped, bias: Tensor | None, residual: Tensor) -> Tensor:
        """Implement `Multiplier.add`."""
        way = self._way_of("added", packed, x)
        if way is not None:
            return self._kernels.multiply(x.contiguous(), packed, way, bias=bias, residual=residual)
        if not self._can_widen(packed, x.dtype):
            return residual.add_(packed.multiply(x, bias))
        return self._dense.add(x, Dense(self._kernels.widen(packed, x.dtype)), bias, residual)

    def _can_widen(self, packed: Grouped, dtype: torch.dtype) -> bool:
        return dtype in _HALF and self._kernels.can_widen(packed, dtype)

    def _way_of(self, kind: Kind, packed: Grouped, x: Tensor) -> Way | None:
        """That of kernels; None: they have no such rows."""
        if x.dtype not in _HALF:
            return None
        way = self._way(kind, packed.outputs, packed.inputs, packed.group, len(x))
        return way if isinstance(way, self._kernels.ways) else None

    def _way(self, kind: Kind, outputs: int, inputs: int, group: int | None, rows: int) -> Way:
        key = kind, outputs, inputs, group, rows
        way = self._found.get(key)
        if way is None:
            product = Product(kind, outputs, inputs, self._kernels.name, group)
            way = self._found[key] = self._choices.find(product, rows)
        return way
