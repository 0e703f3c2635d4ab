"""8-bit floats with one scale: multiplied as those with a scale for each output. Where the checkpoint rounds inputs,
with whatever scale, they are rounded with a scale for each token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from worker_svc.core.formats.fp8_channel import FP8, Fp8ChannelFormat
from worker_svc.core.formats.interface import IN, ONE, OUT, Piece, Tensors
from worker_svc.core.quantization.spec import Fp8ChannelSpec, Fp8TensorSpec


@dataclass(frozen=True, slots=True)
class Fp8TensorFormat:
    """Implement `ConvertedFormat`."""

    spec: Fp8TensorSpec
    needs_whole_rows: bool = False

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Implement `StoredFormat.pieces`."""
        return Piece("weight", (OUT, IN), FP8), Piece(self.spec.scale, (ONE,), torch.float32)

    @property
    def multiplied(self) -> Fp8ChannelFormat:
        """Implement `ConvertedFormat.multiplied`."""
        return Fp8ChannelFormat(Fp8ChannelSpec(self.spec.rounds_inputs))

    def widen(self, tensors: Tensors) -> Tensor:
        """Implement `StoredFormat.widen`."""
        return tensors["weight"].float() * tensors[self.spec.scale]

    def convert(self, tensors: Tensors) -> Tensors:
        """Implement `ConvertedFormat.convert`."""
        weight, scale = tensors["weight"], tensors[self.spec.scale]
        return {"weight": weight, "weight_scale": scale.expand(len(weight), 1)}
