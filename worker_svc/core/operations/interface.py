"""The operations of a pre-norm decoder layer, as large as an implementation can fuse them."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class Norm(Protocol):
    """x / rms(x) * weight over the last dimension."""

    weight: Tensor  # [size]
    eps: float
    is_folded: bool  # the weight is in the product behind the norm, and ones stand here

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., size] -> like x."""

    def fold(self, weight: Tensor) -> None:
        """Move the norm's weight into that of the product behind it, [outputs, size]."""


@dataclass(frozen=True, slots=True)
class Unscaled:
    """What is left of a norm to whoever reads the product behind it: row i is to be divided by rms(hidden[i])."""

    hidden: Tensor  # [rows, size]
    eps: float

    def scales(self) -> Tensor:
        """f32[rows, 1]."""
        return (self.hidden.float().square().mean(-1, keepdim=True) + self.eps).rsqrt()


class Projection(Protocol):
    """x @ weight.T + bias with this rank's rows of the weight; the output is not gathered."""

    weight: Tensor  # [outputs, inputs]
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, inputs] -> [tokens, outputs]."""


class Reduction(Protocol):
    """x @ weight.T + bias with this rank's columns of the weight; the output is summed over the ranks."""

    weight: Tensor  # [outputs, inputs]
    bias: Tensor | None
    is_whole: bool  # there are no other ranks to sum over

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, inputs] -> [tokens, outputs], whole on every rank."""


class Operations(Protocol):
    """Chosen once from device and dtype. Hidden states and residuals are [tokens, hidden_size]."""

    def norm_linear(self, hidden: Tensor, norm: Norm, linear: Projection) -> Tensor:
        """linear(norm(hidden)) -> [tokens, outputs]."""

    def fold_norm(self, norm: Norm, linear: Projection) -> None:
        """Prepare `norm_linear_unscaled`, once, where these operations gain by that; the weights are there."""

    def norm_linear_unscaled(self, hidden: Tensor, norm: Norm, linear: Projection) -> tuple[Tensor, Unscaled | None]:
        """linear(norm(hidden)) -> [tokens, outputs], but for the scales of its rows if they come along."""

    def linear_add(self, x: Tensor, linear: Reduction, residual: Tensor) -> Tensor:
        """residual + linear(x), like `residual`, which may be overwritten by it."""

    def norm_gated(self, hidden: Tensor, norm: Norm, gate_up: Projection) -> Tensor:
        """silu(gate) * up -> [tokens, outputs / 2]; the outputs of `gate_up(norm(hidden))` are gates, then ups."""
