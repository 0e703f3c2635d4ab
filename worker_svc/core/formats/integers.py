"""Numbers of some bits with a scale for each output or group of its inputs, as compressed-tensors stores them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from worker_svc.core.formats.interface import IN, ONE, OUT, Dim, Piece, Tensors
from worker_svc.core.formats.words import WORD, WORD_BITS, groups, spread, unpack
from worker_svc.core.quantization.spec import IntSpec

_WEIGHT, _PACKED, _SCALE, _ZEROS, _ORDER = (
    *("weight", "weight_packed", "weight_scale"),
    *("weight_zero_point", "weight_g_idx"),
)


@dataclass(frozen=True, slots=True)
class IntFormat:
    """Implement `StoredFormat`."""

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

    def widen(self, tensors: Tensors) -> Tensor:
        """Implement `StoredFormat.widen`."""
        numbers = self._signed(tensors[_PACKED], 1) if self.spec.is_packed else tensors[_WEIGHT].int()
        if self.spec.has_zeros:
            zeros = tensors[_ZEROS]
            zeros = self._signed(zeros, 0)[: len(numbers)] if self.spec.is_packed else zeros.int()
            numbers = numbers - self._of_inputs(zeros, tensors, numbers.shape[1])
        return numbers * self._of_inputs(tensors[_SCALE], tensors, numbers.shape[1])

    def _signed(self, words: Tensor, dim: int) -> Tensor:
        """The numbers, which are stored with half their range added."""
        return unpack(words, self.spec.bits, dim) - (1 << (self.spec.bits - 1))

    def _of_inputs(self, of_groups: Tensor, tensors: Tensors, count: int) -> Tensor:
        if self.spec.has_order:
            return of_groups[:, tensors[_ORDER].long()]
        return spread(of_groups, self.spec.group, 1, count)
