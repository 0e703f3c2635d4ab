"""8-bit floats with a scale for each block of outputs and inputs (DeepSeek-V3; Liu et al., 2024), which are multiplied
with the scales of its blocks for each output.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from worker_svc.core.formats.fp8_channel import FP8
from worker_svc.core.formats.fp8_groups import Fp8GroupsFormat
from worker_svc.core.formats.interface import IN, OUT, Dim, Piece, Tensors
from worker_svc.core.quantization.spec import Fp8BlockSpec


@dataclass(frozen=True, slots=True)
class Fp8BlockFormat:
    """Implement `ConvertedFormat`."""

    spec: Fp8BlockSpec
    needs_whole_rows: bool = False

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Implement `StoredFormat.pieces`."""
        blocks = Dim("out", self.spec.outputs), Dim("in", self.spec.inputs)
        return Piece("weight", (OUT, IN), FP8), Piece(self.spec.scale, blocks, torch.float32)

    @property
    def multiplied(self) -> Fp8GroupsFormat:
        """Implement `ConvertedFormat.multiplied`."""
        return Fp8GroupsFormat(self.spec.inputs)

    def widen(self, tensors: Tensors) -> Tensor:
        """Implement `StoredFormat.widen`."""
        weight, scales = self.of_outputs(tensors).values()
        return weight.float() * scales.repeat_interleave(self.spec.inputs, 1)[:, : weight.shape[1]]

    def convert(self, tensors: Tensors) -> Tensors:
        """Implement `ConvertedFormat.convert`."""
        weight, scales = self.of_outputs(tensors).values()
        return {"weight": weight, "weight_scale": scales.t()}

    def of_outputs(self, tensors: Tensors) -> Tensors:
        """The tensors of `StackedFp8Format`: each output has the scales of its block."""
        weight = tensors["weight"]
        scales = tensors[self.spec.scale].repeat_interleave(self.spec.outputs, 0)[: len(weight)]
        return {"weight": weight, "weight_scale": scales}
