"""Numbers of some bits with a zero and a scale for each group of inputs (GPTQ; Frantar et al., 2022), which may be any
inputs (`desc_act`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from worker_svc.core.formats.int4 import INT4_BITS, Integers, widen_integers
from worker_svc.core.formats.interface import IN, OUT, Dim, Piece, Tensors
from worker_svc.core.formats.words import WORD, WORD_BITS, groups, unpack
from worker_svc.core.quantization.spec import GptqSpec


@dataclass(frozen=True, slots=True)
class GptqFormat:
    """Implement `IntegersFormat`."""

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

    @property
    def is_int4(self) -> bool:
        """Implement `IntegersFormat.is_int4`."""
        return self.spec.bits == INT4_BITS and not self.spec.has_order

    @property
    def group(self) -> int | None:
        """Implement `IntegersFormat.group`."""
        return self.spec.group

    def read(self, tensors: Tensors) -> Integers:
        """Implement `IntegersFormat.read`."""
        numbers = unpack(tensors["qweight"], self.spec.bits, 0)
        scales = tensors["scales"]
        zeros = self._zeros(tensors["qzeros"])[:, : scales.shape[1]]  # the last word may have room
        return Integers(numbers.t(), zeros.t(), scales.t())

    def widen(self, tensors: Tensors) -> Tensor:
        """Implement `StoredFormat.widen`."""
        found = self.read(tensors)
        if not self.spec.has_order:
            return widen_integers(found, self.group)
        order = tensors["g_idx"].long()
        return (found.numbers - found.zeros[:, order]) * found.scales[:, order]

    def _zeros(self, words: Tensor) -> Tensor:
        if self.spec.zeros_less_one:
            ones = sum(1 << place for place in range(0, WORD_BITS, self.spec.bits))
            words = words + ones  # at once in all of a word, as they were taken off: zeros of nought borrow
        return unpack(words, self.spec.bits, 1)
