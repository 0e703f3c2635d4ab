"""Weights of experts as floats of 4 bits (E2M1) with a power of two for 32 inputs (OCP Microscaling, 2023).

Of 64 inputs, a span, a byte holds one of the first half in its lower bits and one of the second in its upper bits: what
kernels read of one byte goes into two products, and each half has one power of two. Powers are counted from the largest
of their output, which has a scale for that, so that they fit any float; what is smaller by more than 2^127 is zero.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from worker_svc.core.formats.e2m1 import read_e2m1
from worker_svc.core.formats.interface import ONE, OUT, Dim, Piece, Tensors

GROUP = 32  # inputs that share a power of two
SPAN = 2 * GROUP
BIAS = 127  # of exponents
_SPANS = Dim("in", SPAN)


class StackedFp4:
    """Implement `StackedWeight`."""

    def __init__(self, numbers: Tensor, exponents: Tensor, scales: Tensor, inputs: int) -> None:
        self.numbers = numbers  # u8[experts, outputs, spans, GROUP]
        self.exponents = exponents  # u8[experts, outputs, spans, 2]: at most BIAS, which stands for 1
        self.scales = scales  # f32[experts, outputs, 1]
        self._inputs = inputs

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
        return self._inputs

    def of(self, expert: int) -> Tensor:
        """Implement `StackedWeight.of`."""
        # A byte's two numbers stand side by side at first, and belong to the halves of a span.
        numbers = read_e2m1(self.numbers[expert])
        numbers = numbers.view(*numbers.shape[:2], GROUP, 2).transpose(-1, -2)
        floats = torch.ldexp(numbers, self.exponents[expert].int().unsqueeze(-1) - BIAS)
        return floats.flatten(1)[:, : self._inputs] * self.scales[expert]

    def scale_outputs(self, factor: float) -> None:
        """Implement `StackedWeight.scale_outputs`."""
        self.scales.mul_(factor)


class StackedFp4Format:
    """Implement `StackedFormat`."""

    pieces = (
        Piece("numbers", (OUT, _SPANS, Dim("none", GROUP)), torch.uint8),
        Piece("exponents", (OUT, _SPANS, Dim("none", 2)), torch.uint8),
        Piece("weight_scale", (OUT, ONE), torch.float32),
    )
    unit = SPAN

    def stack(self, tensors: Tensors, inputs: int) -> StackedFp4:
        """Implement `StackedFormat.stack`."""
        return StackedFp4(tensors["numbers"], tensors["exponents"], tensors["weight_scale"], inputs)


def pack_fp4(packed: Tensor, exponents: Tensor) -> Mapping[str, Tensor]:
    """packed u8[outputs, inputs / 2], the lower four bits first, exponents u8[outputs, inputs / 32] -> the tensors of
    `StackedFp4Format`, of which the last span may be filled with zeros.
    """
    outputs, inputs = len(packed), 2 * packed.shape[1]
    missing = -inputs % SPAN
    numbers = torch.nn.functional.pad(torch.stack((packed & 15, packed >> 4), -1).flatten(1), (0, missing))
    low, high = numbers.view(outputs, -1, 2, GROUP).unbind(2)
    largest = exponents.amax(1, keepdim=True).int()
    relative = (exponents.int() - largest + BIAS).clamp(min=0).to(torch.uint8)
    return {
        "numbers": low | high << 4,
        "exponents": torch.nn.functional.pad(relative, (0, missing // GROUP)).view(outputs, -1, 2),
        "weight_scale": torch.ldexp(torch.ones_like(largest, dtype=torch.float32), largest - BIAS),
    }
