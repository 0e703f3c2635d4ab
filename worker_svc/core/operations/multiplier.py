"""The multiplier of a format of weights, and one for any format: torch, without anything fused."""

from typing import Any, Protocol

from torch import Tensor

from worker_svc.core.formats.interface import Packed
from worker_svc.core.operations.interface import Norm


class Multiplier(Protocol):
    """Of one type of `Packed` (the arguments called so are of it). Rows are [rows, inputs]; None: not here, but by
    `multiply` and what is around it.
    """

    def fold_norm(self, norm: Norm, packed: Any, bias: Tensor | None) -> None:
        """Move the norm's weight into the packed one, where products then gain."""

    def of_normed(self, hidden: Tensor, norm: Norm, packed: Any, bias: Tensor | None) -> Tensor | None:
        """norm(hidden) @ weight.T + bias."""

    def gated(
        self, hidden: Tensor, norm: Norm | None, packed: Any, bias: Tensor | None, *, is_gelu: bool = False
    ) -> Tensor | None:
        """silu(gate) * up of norm(hidden), or gelu(gate) * up."""

    def multiply(self, x: Tensor, packed: Any, bias: Tensor | None) -> Tensor:
        """x @ weight.T + bias."""

    def add(self, x: Tensor, packed: Any, bias: Tensor | None, residual: Tensor) -> Tensor:
        """residual + x @ weight.T + bias, in place of `residual`."""


class PlainMultiplier:
    """Implement `Multiplier`: of any format."""

    def fold_norm(self, norm: Norm, packed: Packed, bias: Tensor | None) -> None:
        """Implement `Multiplier.fold_norm`: nothing is gained."""

    def of_normed(self, hidden: Tensor, norm: Norm, packed: Packed, bias: Tensor | None) -> Tensor | None:  # noqa: ARG002
        """Implement `Multiplier.of_normed`."""
        return None

    def gated(
        self,
        hidden: Tensor,  # noqa: ARG002
        norm: Norm | None,  # noqa: ARG002
        packed: Packed,  # noqa: ARG002
        bias: Tensor | None,  # noqa: ARG002
        *,
        is_gelu: bool = False,  # noqa: ARG002
    ) -> Tensor | None:
        """Implement `Multiplier.gated`."""
        return None

    def multiply(self, x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        """Implement `Multiplier.multiply`."""
        return packed.multiply(x, bias)

    def add(self, x: Tensor, packed: Packed, bias: Tensor | None, residual: Tensor) -> Tensor:
        """Implement `Multiplier.add`."""
        return residual.add_(packed.multiply(x, bias))
