"""Numbers of some bits with a zero and a scale for each group of inputs (GPTQ; Frantar et al., 2022), which may be any
inputs (`desc_act`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from worker_svc.core.formats.interface import IN, OUT, Dim, Piece, Tensors
from worker_svc.core.formats.words import WORD, WORD_BITS, groups, spread, unpack
from worker_svc.core.quantization.spec import GptqSpec


@dataclass(frozen=True, slots=True)
class GptqFormat:
    """Implement `StoredFormat`."""

    spec: GptqSpec

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Implement `StoredFormat.pieces`: of inputs in any order a rank may have some of every group."""
        in_a_word = WORD_BITS // self.spec.bits
        grouped = groups(self.spec.group, is_whole=self.spec.has_order)
        order = (Piece("g_idx", (IN,), WORD),) if self.spec.has_order else ()
        return (
            Piece("qweight", (Dim("in", in_a_word), OUT), WORD),
            Piece("qzeros", (grouped, Dim("out", in_a_word)), WORD),
            Piece("scales", (grouped, OUT), torch.float32),
            *order,
        )

    def widen(self, tensors: Tensors) -> Tensor:
        """Implement `StoredFormat.widen`."""
        numbers = unpack(tensors["qweight"], self.spec.bits, 0)
        scales = tensors["scales"]
        zeros = self._zeros(tensors["qzeros"])[:, : scales.shape[1]]  # the last word may have room
        if self.spec.has_order:
            order = tensors["g_idx"].long()
            return ((numbers - zeros[order]) * scales[order]).t()
        zeros, scales = (spread(each, self.spec.group, 0, len(numbers)) for each in (zeros, scales))
        return ((numbers - zeros) * scales).t()

    def _zeros(self, words: Tensor) -> Tensor:
        if self.spec.zeros_less_one:
            ones = sum(1 << place for place in range(0, WORD_BITS, self.spec.bits))
            words = words + ones  # at once in all of a word, as they were taken off: zeros of nought borrow
        return unpack(words, self.spec.bits, 1)
