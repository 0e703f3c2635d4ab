"""Formats: the tensors that store a linear layer, and the weight that is made of them.

From what each dimension counts follow the part of each tensor that a rank reads, the merge of several layers in one
product, and the units by which ranks may cut.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from contract.domain.errors import unimplemented


@dataclass(frozen=True, slots=True)
class Dim:
    """A dimension of a stored tensor: it counts outputs or inputs, `per` of them at each place, or has one place."""

    of: Literal["out", "in", "one"]
    per: int = 1

    def places(self, wanted: slice) -> slice:
        """The places where the wanted outputs or inputs are stored.

        Raises:
            PenstockError: UNIMPLEMENTED: ranks cut within a place.
        """
        if self.of == "one":
            return slice(0, 1)
        if wanted.start % self.per:
            raise unimplemented(f"tensor-parallel ranks that cut {self.of}puts within a group of {self.per}")
        return slice(wanted.start // self.per, -(-wanted.stop // self.per))


OUT, IN, ONE = Dim("out"), Dim("in"), Dim("one")


@dataclass(frozen=True, slots=True)
class Piece:
    """A stored tensor of a layer: `{layer}.{suffix}`. Without a dtype it has that of the model."""

    suffix: str
    dims: tuple[Dim, ...]
    dtype: torch.dtype | None = None

    def index(self, outputs: slice, inputs: slice) -> tuple[slice, ...]:
        """The place where it stores these outputs for these inputs."""
        return tuple(dim.places(inputs if dim.of == "in" else outputs) for dim in self.dims)

    def shape(self, outputs: int, inputs: int) -> tuple[int, ...]:
        """Of a layer of so many."""
        return tuple(part.stop for part in self.index(slice(0, outputs), slice(0, inputs)))


class Packed(Protocol):
    """The weight of a product, [outputs, inputs], as its kernels read it."""

    @property
    def outputs(self) -> int:
        """Numbers of a row that come out."""

    @property
    def inputs(self) -> int:
        """Numbers of a row that go in."""

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., inputs] -> x @ weight.T + bias [..., outputs]: by torch, on any device."""

    def scale_outputs(self, factor: float) -> None:
        """Multiply the weight by `factor`, once."""

    def reorder_outputs(self, order: Tensor) -> None:
        """Take outputs in another order, i64[outputs], once."""


class Format(Protocol):
    """A way to store a linear layer."""

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The tensors that store it."""

    def pack(self, tensors: Mapping[str, Tensor]) -> Packed:
        """The weight in tensors by suffix, which are filled later: whole, or this rank's part."""


def cut_unit(format_: Format, of: Literal["out", "in"]) -> int:
    """Outputs or inputs that ranks may not part."""
    return math.lcm(*(dim.per for piece in format_.pieces for dim in piece.dims if dim.of == of))
