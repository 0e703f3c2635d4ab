"""Numbers of 4 bits with a zero and a scale for each group of inputs, in AutoAWQ's order (AWQ; Lin et al., 2023)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from worker_svc.core.formats.int4 import Integers, widen_integers
from worker_svc.core.formats.interface import IN, OUT, Dim, Piece, Tensors
from worker_svc.core.formats.words import WORD, WORD_BITS, groups, unpack
from worker_svc.core.quantization.spec import AwqSpec

_BITS = 4
_IN_A_WORD = WORD_BITS // _BITS
_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # of each output in a word


@dataclass(frozen=True, slots=True)
class AwqFormat:
    """Implement `IntegersFormat`."""

    spec: AwqSpec

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Implement `StoredFormat.pieces`."""
        words, grouped = Dim("out", _IN_A_WORD), groups(self.spec.group)
        return (
            Piece("qweight", (IN, words), WORD),
            Piece("qzeros", (grouped, words), WORD),
            Piece("scales", (grouped, OUT), torch.float32),
        )

    @property
    def is_int4(self) -> bool:
        """Implement `IntegersFormat.is_int4`."""
        return True

    @property
    def group(self) -> int | None:
        """Implement `IntegersFormat.group`."""
        return self.spec.group

    def read(self, tensors: Tensors) -> Integers:
        """Implement `IntegersFormat.read`."""
        scales = tensors["scales"]
        # The last word may have room for more.
        numbers, zeros = (_outputs(tensors[name])[:, : scales.shape[1]] for name in ("qweight", "qzeros"))
        return Integers(numbers.t(), zeros.t(), scales.t())

    def widen(self, tensors: Tensors) -> Tensor:
        """Implement `StoredFormat.widen`."""
        return widen_integers(self.read(tensors), self.group)


def _outputs(words: Tensor) -> Tensor:
    """[rows, words] -> [rows, outputs]."""
    return unpack(words, _BITS, 1).view(len(words), -1, _IN_A_WORD)[..., _PLACES].flatten(1)
