"""Weights as floats."""

import torch.nn.functional as F  # noqa: N812  (the name that torch's own documentation uses)
from torch import Tensor

from worker_svc.core.formats.interface import IN, OUT, Piece, Tensors


class Dense:
    """Implement `Packed`."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight  # [outputs, inputs]

    @property
    def outputs(self) -> int:
        """Implement `Packed.outputs`."""
        return self.weight.shape[0]

    @property
    def inputs(self) -> int:
        """Implement `Packed.inputs`."""
        return self.weight.shape[1]

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Implement `Packed.multiply`."""
        return F.linear(x, self.weight, bias)

    def scale_outputs(self, factor: float) -> None:
        """Implement `Packed.scale_outputs`."""
        self.weight.mul_(factor)

    def reorder_outputs(self, order: Tensor) -> None:
        """Implement `Packed.reorder_outputs`."""
        self.weight.copy_(self.weight[order])


class DenseFormat:
    """Implement `Format`: one tensor, in the dtype of the model."""

    pieces = (Piece("weight", (OUT, IN)),)

    def widen(self, tensors: Tensors) -> Tensor:
        """Implement `StoredFormat.widen`."""
        return tensors["weight"]

    def takes(self, outputs: int, inputs: int) -> bool:  # noqa: ARG002
        """Implement `Format.takes`: torch multiplies any."""
        return True

    def pack(self, tensors: Tensors, inputs: int) -> Dense:  # noqa: ARG002
        """Implement `Format.pack`."""
        return Dense(tensors["weight"])
