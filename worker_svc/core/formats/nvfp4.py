"""Floats of 4 bits (E2M1) with an 8-bit float for each 16 inputs and a scale of all of these (NVFP4; NVIDIA, 2025)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from worker_svc.core.formats.e2m1 import read_e2m1
from worker_svc.core.formats.fp8_channel import FP8
from worker_svc.core.formats.interface import ONE, OUT, Dim, Piece, Tensors
from worker_svc.core.quantization.spec import Nvfp4Spec

_GROUP = 16


@dataclass(frozen=True, slots=True)
class Nvfp4Format:
    """Implement `StoredFormat`."""

    spec: Nvfp4Spec

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Implement `StoredFormat.pieces`: two numbers are in a byte."""
        return (
            Piece(self.spec.numbers, (OUT, Dim("in", 2)), torch.uint8),
            Piece("weight_scale", (OUT, Dim("in", _GROUP)), FP8),
            Piece(self.spec.scale, (ONE,), torch.float32),
        )

    def widen(self, tensors: Tensors) -> Tensor:
        """Implement `StoredFormat.widen`."""
        numbers = read_e2m1(tensors[self.spec.numbers])
        scales, of_all = tensors["weight_scale"].float(), tensors[self.spec.scale]
        scales = scales / of_all if self.spec.divides else scales * of_all
        return numbers * scales.repeat_interleave(_GROUP, 1)
