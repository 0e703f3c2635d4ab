"""Formats: the tensors that store a linear layer, and the weight that is made of them.

From what each dimension counts follow the part of each tensor that a rank reads, the merge of several layers in one
product, and the units by which tensors can be read.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

Tensors: TypeAlias = Mapping[str, Tensor]  # of a layer, by suffix


@dataclass(frozen=True, slots=True)
class Dim:
    """A dimension of a stored tensor: it counts outputs or inputs, `per` of them at each place, or has `per` places."""

    of: Literal["out", "in", "none"]
    per: int = 1
    is_whole: bool = False  # all of it is read, whatever is wanted

    def size(self, count: int) -> int:
        """Its places, in a layer of so many outputs or inputs."""
        return self.per if self.of == "none" else -(-count // self.per)

    def places(self, wanted: slice) -> slice:
        """The places where the wanted outputs or inputs are stored; these begin with one."""
        if self.of == "none" or self.is_whole:
            return slice(None)
        return slice(wanted.start // self.per, -(-wanted.stop // self.per), wanted.step)


OUT, IN, ONE = Dim("out"), Dim("in"), Dim("none")


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
        return tuple(dim.size(inputs if dim.of == "in" else outputs) for dim in self.dims)


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


class StoredFormat(Protocol):
    """A way to store a linear layer."""

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The tensors that store it."""

    def widen(self, tensors: Tensors) -> Tensor:
        """The weight that they stand for, as floats [outputs, inputs]."""


class Format(StoredFormat, Protocol):
    """A way to store a linear layer that is a way to multiply it, too."""

    def takes(self, outputs: int, inputs: int) -> bool:
        """Return whether a product of such a size can be multiplied in this way."""

    def pack(self, tensors: Tensors, inputs: int) -> Packed:
        """The weight of so many inputs in tensors by suffix, which are filled later: whole, or this rank's part."""


class ConvertedFormat(StoredFormat, Protocol):
    """A way to store a linear layer that is multiplied in another."""

    @property
    def multiplied(self) -> Format:
        """The other."""

    @property
    def needs_whole_rows(self) -> bool:
        """Return whether an input can be converted only together with all others of its row."""

    def convert(self, tensors: Tensors) -> Tensors:
        """The tensors of the other."""


class Multiplied(Protocol):
    """A form in which weights are multiplied: of one layer, or of all experts."""

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The tensors that hold them."""


Form_co = TypeVar("Form_co", bound=Multiplied, covariant=True)


@dataclass(frozen=True)
class Reading(Generic[Form_co]):
    """The way from stored tensors of a linear layer to those of a product."""

    pieces: tuple[Piece, ...]  # stored
    multiplied: Form_co
    convert: Callable[[Tensors], Tensors] | None = None  # to tensors of `multiplied`; None: they are these
    needs_whole_rows: bool = False  # what becomes of an input depends on others

    def can_cut(self, inputs: slice, total: int) -> bool:
        """Return whether tensors of `multiplied` can have these inputs alone, of so many: no group is cut."""
        unit = math.lcm(*_units(self.multiplied.pieces, "in"))
        return bool(inputs.start % unit == 0 and (inputs.stop == total or inputs.stop % unit == 0))

    def stored_part(self, of: Literal["out", "in"], wanted: slice, total: int) -> slice:
        """The outputs or inputs to read for those wanted: up to the ends of the groups that these are in."""
        if of == "in" and self.needs_whole_rows:
            return slice(0, total)
        unit = math.lcm(*_units(self.pieces, of))
        if unit == 1:
            return wanted
        assert wanted.step in (None, 1), "outputs that stand in turns are not stored in groups"
        return slice(wanted.start // unit * unit, min(total, -(-wanted.stop // unit) * unit))


def _units(pieces: Iterable[Piece], of: str) -> list[int]:
    return [dim.per for piece in pieces for dim in piece.dims if dim.of == of and not dim.is_whole]
