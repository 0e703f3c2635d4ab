"""Rows of a product whose norm is left to whoever reads them."""

from dataclasses import dataclass

from torch import Tensor

# Up to so many rows come scaled: among dependent launches a norm costs no more than to find its scale twice.
MOST_SCALED_ROWS = 64


@dataclass(frozen=True, slots=True)
class Unscaled:
    """The part of a norm left to the reader of the product after it: row i is to be divided by rms(hidden[i])."""

    hidden: Tensor  # [rows, size]
    eps: float

    def scales(self) -> Tensor:
        """f32[rows, 1]."""
        return (self.hidden.float().square().mean(-1, keepdim=True) + self.eps).rsqrt()
