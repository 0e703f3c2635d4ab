"""Floats of a dense checkpoint that are rounded to 8 bits when they are read, with a scale for each output."""

from dataclasses import dataclass

from torch import Tensor

from worker_svc.core.formats.dense import DenseFormat
from worker_svc.core.formats.fp8_channel import Fp8ChannelFormat, round_rows
from worker_svc.core.formats.interface import Piece, Tensors
from worker_svc.core.quantization.spec import Fp8ChannelSpec, Fp8OnlineSpec


@dataclass(frozen=True, slots=True)
class Fp8OnlineFormat:
    """Implement `ConvertedFormat`. Scales are those of whole rows, however many ranks part them."""

    spec: Fp8OnlineSpec
    needs_whole_rows: bool = True

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Implement `StoredFormat.pieces`."""
        return DenseFormat.pieces

    @property
    def multiplied(self) -> Fp8ChannelFormat:
        """Implement `ConvertedFormat.multiplied`."""
        return Fp8ChannelFormat(Fp8ChannelSpec(self.spec.rounds_inputs))

    def widen(self, tensors: Tensors) -> Tensor:
        """Implement `StoredFormat.widen`: as it is stored."""
        return tensors["weight"]

    def convert(self, tensors: Tensors) -> Tensors:
        """Implement `ConvertedFormat.convert`."""
        weight, scales = round_rows(tensors["weight"])
        return {"weight": weight, "weight_scale": scales}
