"""8-bit floats with a scale for each group of an output's inputs, as kernels multiply them.

Rows are not rounded, whatever the checkpoint's scheme says of them: products of few rows are bound by the bytes of
their weights, and many rows are multiplied with floats.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  (the name that torch's own documentation uses)
from torch import Tensor

from worker_svc.core.formats.fp8_channel import FP8
from worker_svc.core.formats.interface import IN, OUT, Dim, Piece, Tensors


class Fp8Groups:
    """Implement `Packed`."""

    def __init__(self, weight: Tensor, scales: Tensor, group: int) -> None:
        self.weight = weight  # [outputs, inputs]
        self.scales = scales  # f32[groups, outputs]
        self.group = group  # inputs that share a scale; the last group may have fewer

    @property
    def outputs(self) -> int:
        """Implement `Packed.outputs`."""
        return self.weight.shape[0]

    @property
    def inputs(self) -> int:
        """Implement `Packed.inputs`."""
        return self.weight.shape[1]

    def widen(self, dtype: torch.dtype) -> Tensor:
        """The weight, rounded once, [outputs, inputs]."""
        scales = self.scales.t().repeat_interleave(self.group, 1)[:, : self.inputs]
        return (self.weight.float() * scales).to(dtype)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Implement `Packed.multiply`."""
        return F.linear(x, self.widen(x.dtype), bias)

    def scale_outputs(self, factor: float) -> None:
        """Implement `Packed.scale_outputs`."""
        self.scales.mul_(factor)

    def reorder_outputs(self, order: Tensor) -> None:
        """Implement `Packed.reorder_outputs`."""
        rows = self.weight.view(torch.uint8)
        rows.copy_(rows[order])
        self.scales.copy_(self.scales[:, order])


@dataclass(frozen=True, slots=True)
class Fp8GroupsFormat:
    """Implement `Format`."""

    group: int

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Implement `Format.pieces`."""
        return Piece("weight", (OUT, IN), FP8), Piece("weight_scale", (Dim("in", self.group), OUT), torch.float32)

    def widen(self, tensors: Tensors) -> Tensor:
        """Implement `StoredFormat.widen`."""
        return self.pack(tensors, tensors["weight"].shape[1]).widen(torch.float32)

    def pack(self, tensors: Tensors, inputs: int) -> Fp8Groups:  # noqa: ARG002
        """Implement `Format.pack`."""
        return Fp8Groups(tensors["weight"], tensors["weight_scale"], self.group)
