"""Weights of experts as they are multiplied, and the forms that they have."""

from typing import Protocol

from torch import Tensor

from worker_svc.core.formats.interface import Piece, Tensors


class StackedWeight(Protocol):
    """The weights of the products of all experts, [experts, outputs, inputs], as their kernels read them."""

    @property
    def count(self) -> int:
        """Experts."""

    @property
    def outputs(self) -> int:
        """Numbers of a row that come out of one."""

    @property
    def inputs(self) -> int:
        """Numbers of a row that go in."""

    def of(self, expert: int) -> Tensor:
        """The weight that one expert's numbers stand for, as floats [outputs, inputs]: by torch, on any device."""

    def scale_outputs(self, factor: float) -> None:
        """Multiply all weights by `factor`, once."""


class StackedFormat(Protocol):
    """A form in which the weights of experts are multiplied."""

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The tensors that hold one expert's; there are as many as experts, one after the other."""

    @property
    def unit(self) -> int:
        """Inputs that are held together: ranks part them between such groups."""

    @property
    def outputs_together(self) -> int:
        """Outputs that are held together: layers of which one tensor has several have so many, or a multiple."""

    def stack(self, tensors: Tensors, inputs: int, /) -> StackedWeight:
        """The weights of so many inputs in tensors by suffix, [experts, ...], which are filled later."""
