"""Weights of experts as floats."""

from torch import Tensor

from worker_svc.core.formats.dense import DenseFormat
from worker_svc.core.formats.interface import Tensors


class StackedFloats:
    """Implement `StackedWeight`."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight  # [experts, outputs, inputs]

    @property
    def count(self) -> int:
        """Implement `StackedWeight.count`."""
        return self.weight.shape[0]

    @property
    def outputs(self) -> int:
        """Implement `StackedWeight.outputs`."""
        return self.weight.shape[1]

    @property
    def inputs(self) -> int:
        """Implement `StackedWeight.inputs`."""
        return self.weight.shape[2]

    def of(self, expert: int) -> Tensor:
        """Implement `StackedWeight.of`."""
        return self.weight[expert]

    def scale_outputs(self, factor: float) -> None:
        """Implement `StackedWeight.scale_outputs`."""
        self.weight.mul_(factor)


class StackedFloatsFormat:
    """Implement `StackedFormat`: one tensor, in the dtype of the model."""

    pieces = DenseFormat.pieces
    unit = outputs_together = 1

    def stack(self, tensors: Tensors, _inputs: int) -> StackedFloats:
        """Implement `StackedFormat.stack`."""
        return StackedFloats(tensors["weight"])
