"""Weights of experts as floats of 4 bits (E2M1) with a power of two for 32 inputs (OCP Microscaling, 2023).

Powers are counted from the largest of their output, which has a scale for that, so that they fit any float; what is
smaller by more than 2^127 is zero.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from worker_svc.core.formats.e2m1 import read_e2m1
from worker_svc.core.formats.interface import ONE, OUT, Dim, Piece, Tensors

GROUP = 32  # inputs that share a power of two
BIAS = 127  # of exponents


class StackedFp4:
    """Implement `StackedWeight`."""

    def __init__(self, numbers: Tensor, exponents: Tensor, scales: Tensor) -> None:
        assert 2 * numbers.shape[2] == GROUP * exponents.shape[2], "kernels read whole groups"
        self.numbers = numbers  # u8[experts, outputs, inputs / 2], the lower four bits first
        self.exponents = exponents  # u8[experts, outputs, inputs / GROUP]: at most BIAS, which stands for 1
        self.scales = scales  # f32[experts, outputs, 1]

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
        return 2 * self.numbers.shape[2]

    def of(self, expert: int) -> Tensor:
        """Implement `StackedWeight.of`."""
        exponents = self.exponents[expert].int().repeat_interleave(GROUP, 1) - BIAS
        return torch.ldexp(read_e2m1(self.numbers[expert]), exponents) * self.scales[expert]

    def scale_outputs(self, factor: float) -> None:
        """Implement `StackedWeight.scale_outputs`."""
        self.scales.mul_(factor)


class StackedFp4Format:
    """Implement `StackedFormat`."""

    pieces = (
        Piece("numbers", (OUT, Dim("in", 2)), torch.uint8),
        Piece("exponents", (OUT, Dim("in", GROUP)), torch.uint8),
        Piece("weight_scale", (OUT, ONE), torch.float32),
    )
    unit = GROUP

    def stack(self, tensors: Tensors) -> StackedFp4:
        """Implement `StackedFormat.stack`."""
        return StackedFp4(tensors["numbers"], tensors["exponents"], tensors["weight_scale"])


def pack_fp4(packed: Tensor, exponents: Tensor) -> Mapping[str, Tensor]:
    """packed u8[outputs, inputs / 2], the lower four bits first, exponents u8[outputs, inputs / 32] -> the tensors of
    `StackedFp4Format`.
    """
    largest = exponents.amax(1, keepdim=True).int()
    return {
        "numbers": packed,
        "exponents": (exponents.int() - largest + BIAS).clamp(min=0).to(torch.uint8),
        "weight_scale": torch.ldexp(torch.ones_like(largest, dtype=torch.float32), largest - BIAS),
    }
