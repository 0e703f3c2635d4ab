"""Floats of 4 bits (E2M1) with a power of two (E8M0) for each 32 inputs (OCP Microscaling, 2023): in one tensor of
blocks, as gpt-oss has them, or as other layers have theirs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from worker_svc.core.formats.e2m1 import read_e2m1
from worker_svc.core.formats.interface import OUT, Dim, Piece, Tensors
from worker_svc.core.formats.stacked.fp4 import pack_fp4
from worker_svc.core.quantization.spec import Mxfp4Spec

_GROUP = 32
_BIAS = 127  # of exponents
_GROUPED = Dim("in", _GROUP)


@dataclass(frozen=True, slots=True)
class Mxfp4Format:
    """Implement `StoredFormat`."""

    spec: Mxfp4Spec

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Implement `StoredFormat.pieces`: two numbers are in a byte."""
        if self.spec.has_blocks:
            blocks = Piece("blocks", (OUT, _GROUPED, Dim("none", _GROUP // 2)), torch.uint8)
            return blocks, Piece("scales", (OUT, _GROUPED), torch.uint8)
        packed = Piece("weight_packed", (OUT, Dim("in", 2)), torch.uint8)
        return packed, Piece("weight_scale", (OUT, _GROUPED), torch.uint8)

    def widen(self, tensors: Tensors) -> Tensor:
        """Implement `StoredFormat.widen`."""
        packed, scales = (tensors[piece.suffix] for piece in self.pieces)
        numbers = read_e2m1(packed.flatten(1))
        exponents = (scales.int() - _BIAS).repeat_interleave(_GROUP, 1)
        return torch.ldexp(numbers, exponents[:, : numbers.shape[1]])

    def repack(self, tensors: Tensors) -> Tensors:
        """The tensors of `StackedFp4Format`."""
        packed, scales = (tensors[piece.suffix] for piece in self.pieces)
        return pack_fp4(packed.flatten(1), scales)
