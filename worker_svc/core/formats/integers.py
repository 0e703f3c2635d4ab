"""Numbers of some bits with a scale for each output or group of its inputs, as compressed-tensors stores them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from worker_svc.core.formats.int4 import INT4_BITS, Integers, widen_integers
from worker_svc.core.formats.interface import IN, ONE, OUT, Dim, Piece, Tensors
from worker_svc.core.formats.words import WORD, WORD_BITS, groups, unpack
from worker_svc.core.quantization.spec import IntSpec

_WEIGHT, _PACKED, _SCALE, _ZEROS, _ORDER = (
    *("weight", "weight_packed", "weight_scale"),
    *("weight_zero_point", "weight_g_idx"),
)


@dataclass(frozen=True, slots=True)
class IntFormat:
    """Implement `IntegersFormat`."""

    spec: IntSpec

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Implement `StoredFormat.pieces`."""
        grouped = groups(self.spec.group, is_whole=self.spec.has_order)
        scales = (ONE,) if self.spec.has_one_scale else (OUT, grouped)
        pieces = [Piece(_SCALE, scales, torch.float32)]
        if self.spec.is_packed:
            in_a_word = WORD_BITS // self.spec.bits
            pieces.append(Piece(_PACKED, (OUT, Dim("in", in_a_word)), WORD))
            zeros = Piece(_ZEROS, (Dim("out", in_a_word), grouped), WORD)
        else:
            pieces.append(Piece(_WEIGHT, (OUT, IN), torch.int8))
            zeros = Piece(_ZEROS, scales, torch.int8)
        if self.spec.has_zeros:
            pieces.append(zeros)
        if self.spec.has_order:
            pieces.append(Piece(_ORDER, (IN,), WORD))
        return tuple(pieces)

    @property
    def is_int4(self) -> bool:
        """Implement `IntegersFormat.is_int4`."""
        return self.spec.bits == INT4_BITS and not self.spec.has_order

    @property
    def group(self) -> int | None:
        """Implement `IntegersFormat.group`."""
        return self.spec.group

    def read(self, tensors: Tensors) -> Integers:
        """Implement `IntegersFormat.read`: what is stored signed is half the range more, as its zero is."""
        half = 1 << (self.spec.bits - 1)
        scales = tensors[_SCALE]
        is_packed = self.spec.is_packed
        numbers = unpack(tensors[_PACKED], self.spec.bits, 1) if is_packed else tensors[_WEIGHT].int() + half
        if self.spec.has_one_scale:
            scales = scales.expand(len(numbers), 1)
        if not self.spec.has_zeros:
            zeros = torch.full_like(scales, half, dtype=WORD)
        elif self.spec.is_packed:
            zeros = unpack(tensors[_ZEROS], self.spec.bits, 0)[: len(numbers)]
        else:
            zeros = (tensors[_ZEROS].int() + half).expand_as(scales)
        return Integers(numbers, zeros, scales)

    def widen(self, tensors: Tensors) -> Tensor:
        """Implement `StoredFormat.widen`."""
        found = self.read(tensors)
        if not self.spec.has_order:
            return widen_integers(found, self.group)
        order = tensors[_ORDER].long()
        return (found.numbers - found.zeros[:, order]) * found.scales[:, order]
