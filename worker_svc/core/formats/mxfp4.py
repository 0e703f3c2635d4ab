"""Floats of 4 bits (E2M1) with a power of two (E8M0) for each 32 inputs (OCP Microscaling, 2023), as gpt-oss has them:
`{experts}_blocks` and `{experts}_scales`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from worker_svc.core.formats.interface import OUT, Dim, Piece, Tensors
from worker_svc.core.quantization.spec import Mxfp4Spec

_GROUP = 32
_MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
_BIAS = 127  # of exponents


@dataclass(frozen=True, slots=True)
class Mxfp4Format:
    """Implement `StoredFormat`."""

    spec: Mxfp4Spec

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Implement `StoredFormat.pieces`: two numbers are in a byte."""
        grouped = Dim("in", _GROUP)
        blocks = Piece("blocks", (OUT, grouped, Dim("none", _GROUP // 2)), torch.uint8)
        return blocks, Piece("scales", (OUT, grouped), torch.uint8)

    def widen(self, tensors: Tensors) -> Tensor:
        """Implement `StoredFormat.widen`."""
        blocks, exponents = tensors["blocks"], tensors["scales"].int() - _BIAS
        values = torch.tensor([*_MAGNITUDES, *(-each for each in _MAGNITUDES)], device=blocks.device)
        numbers = values[
            torch.stack((blocks & 15, blocks >> 4), -1).flatten(2).long()
        ]  # the lower four bits come first
        return torch.ldexp(numbers, exponents.unsqueeze(-1)).flatten(1)
