"""Weights of experts as 8-bit floats with a scale for each output, or for each group of its inputs.

Inputs are not rounded, whatever the checkpoint's scheme says of them: products of so few rows are bound by the bytes of
their weights.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from worker_svc.core.formats.fp8_channel import FP8
from worker_svc.core.formats.interface import IN, ONE, OUT, Dim, Piece, Tensors


class StackedFp8:
    """Implement `StackedWeight`."""

    def __init__(self, numbers: Tensor, scales: Tensor, group: int | None) -> None:
        self.numbers = numbers  # [experts, outputs, inputs]
        self.scales = scales  # f32[experts, outputs, groups]
        self.group = group  # inputs that share a scale; None: all

    @property
    def count(self) -> int:
        """Implement `StackedWeight.count`."""
        return self.numbers.shape[0]

    @property
    def outputs(self) -> int:
        """Implement `StackedWeight.outputs`."""
        return self.numbers.shape[1]

    @property
    def inputs(self) -> int:
        """Implement `StackedWeight.inputs`."""
        return self.numbers.shape[2]

    def of(self, expert: int) -> Tensor:
        """Implement `StackedWeight.of`."""
        scales = self.scales[expert]
        if self.group is not None:
            scales = scales.repeat_interleave(self.group, 1)[:, : self.inputs]
        return self.numbers[expert].float() * scales

    def scale_outputs(self, factor: float) -> None:
        """Implement `StackedWeight.scale_outputs`."""
        self.scales.mul_(factor)


@dataclass(frozen=True, slots=True)
class StackedFp8Format:
    """Implement `StackedFormat`."""

    group: int | None = None  # inputs that share a scale; None: all

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Implement `StackedFormat.pieces`."""
        groups = ONE if self.group is None else Dim("in", self.group)
        return Piece("weight", (OUT, IN), FP8), Piece("weight_scale", (OUT, groups), torch.float32)

    @property
    def unit(self) -> int:
        """Implement `StackedFormat.unit`."""
        return self.group or 1

    @property
    def outputs_together(self) -> int:
        """Implement `StackedFormat.outputs_together`."""
        return 1

    def stack(self, tensors: Tensors, _inputs: int) -> StackedFp8:
        """Implement `StackedFormat.stack`."""
        return StackedFp8(tensors["weight"], tensors["weight_scale"], self.group)
