"""Weights of experts as floats of 4 bits (E2M1) with a power of two for 32 inputs (OCP Microscaling, 2023).

Powers are counted from the largest of their output, which has a scale for that, so that they fit any float; what is
smaller by more than 2^127 is zero.
"""

import torch
import torch.nn.functional as F  # noqa: N812  (the name that torch's own documentation uses)
from torch import Tensor

from worker_svc.core.formats.e2m1 import e2m1_values
from worker_svc.core.formats.interface import ONE, OUT, Dim, Piece, Tensors
from worker_svc.core.formats.stacked.together import TILE, TOGETHER, by_output, together
from worker_svc.core.formats.words import BLOCK, WORD, WORD_BITS, WORDS, from_words, to_words

GROUP = 32  # inputs that share a power of two
BIAS = 127  # of exponents
_GROUPS = BLOCK // GROUP  # of a block: each has words of its own
# Rotations to the left that bring the numbers p and p + 4 of a word to both its halves, and what each brings: the sign
# is to be the highest bit of 16, the others those where exponent and mantissa of a bf16 meet. No two need the same bit.
_ROTATIONS = (((0, 0x81C081C0),), ((6, 0x81C081C0),), ((28, 0x81C081C0),), ((26, 0x81808180), (2, 0x00400040)))
_MASK = (1 << WORD_BITS) - 1


class StackedFp4:
    """Implement `StackedWeight`: of each expert the words of `to_words`, whose bits stand as by `_ROTATIONS`."""

    def __init__(self, numbers: Tensor, exponents: Tensor, scales: Tensor, inputs: int) -> None:
        self.numbers = numbers  # i32[experts, outputs / TOGETHER, blocks, TOGETHER, WORDS], rounded up
        self.exponents = exponents  # u8[..., TOGETHER, groups], else as numbers: at most BIAS, which stands for 1
        self.scales = scales  # f32[experts, outputs, 1]
        self._inputs = inputs

    @property
    def count(self) -> int:
        """Implement `StackedWeight.count`."""
        return self.numbers.shape[0]

    @property
    def outputs(self) -> int:
        """Implement `StackedWeight.outputs`."""
        return self.scales.shape[1]

    @property
    def inputs(self) -> int:
        """Implement `StackedWeight.inputs`."""
        return self._inputs

    def of(self, expert: int) -> Tensor:
        """Implement `StackedWeight.of`."""
        numbers, exponents = (by_output(each[expert], self.outputs) for each in (self.numbers, self.exponents))
        exponents = exponents.flatten(1).int().repeat_interleave(GROUP, 1) - BIAS
        floats = torch.ldexp(e2m1_values(_unpack(numbers)), exponents)
        return floats[:, : self._inputs] * self.scales[expert]

    def scale_outputs(self, factor: float) -> None:
        """Implement `StackedWeight.scale_outputs`."""
        self.scales.mul_(factor)


class StackedFp4Format:
    """Implement `StackedFormat`; blocks are counted from the first input of a rank."""

    pieces = (
        Piece("numbers", (*TILE, Dim("none", WORDS)), WORD),
        Piece("exponents", (*TILE, Dim("none", _GROUPS)), torch.uint8),
        Piece("weight_scale", (OUT, ONE), torch.float32),
    )
    unit = GROUP
    outputs_together = TOGETHER

    def stack(self, tensors: Tensors, inputs: int) -> StackedFp4:
        """Implement `StackedFormat.stack`."""
        return StackedFp4(tensors["numbers"], tensors["exponents"], tensors["weight_scale"], inputs)


def pack_fp4(packed: Tensor, exponents: Tensor) -> Tensors:
    """packed u8[outputs, inputs / 2], the lower four bits first, exponents u8[outputs, inputs / GROUP, rounded up] ->
    the tensors of `StackedFp4Format`; a last group that is not whole is filled up with noughts.
    """
    packed = F.pad(packed, (0, GROUP // 2 * exponents.shape[1] - packed.shape[1]))
    largest = exponents.amax(1, keepdim=True).int()
    numbers = _pack(torch.stack((packed & 15, packed >> 4), -1).flatten(1))
    # Of groups that fill the last block up, all numbers are zero.
    kept = F.pad((exponents.int() - largest + BIAS).clamp(min=0), (0, numbers.shape[1] * _GROUPS - exponents.shape[1]))
    return {
        "numbers": together(numbers),
        "exponents": together(kept.to(torch.uint8).view(len(packed), -1, _GROUPS)),
        "weight_scale": torch.ldexp(torch.ones_like(largest, dtype=torch.float32), largest - BIAS),
    }


def _pack(numbers: Tensor) -> Tensor:
    """u8[outputs, inputs], of 4 bits -> i32[outputs, blocks, WORDS]."""
    halves = to_words(numbers).long()
    halves = (halves & 8) << 12 | (halves & 7) << 6
    pairs = halves[..., :4] | halves[..., 4:] << 16
    words = torch.zeros_like(pairs[..., 0])
    for place, rotations in enumerate(_ROTATIONS):
        for left, mask in rotations:
            words |= _rotate(pairs[..., place] & mask, WORD_BITS - left)
    return words.to(WORD)


def _unpack(words: Tensor) -> Tensor:
    """Undo `_pack`, but for the noughts: i64[outputs, inputs]."""
    words = words.long() & _MASK
    pairs = torch.zeros(*words.shape, len(_ROTATIONS), dtype=torch.long, device=words.device)
    for place, rotations in enumerate(_ROTATIONS):
        for left, mask in rotations:
            pairs[..., place] |= _rotate(words, left) & mask
    halves = torch.cat((pairs, pairs >> 16), -1)
    return from_words((halves >> 12) & 8 | (halves >> 6) & 7)


def _rotate(words: Tensor, left: int) -> Tensor:
    return (words << left | words >> (WORD_BITS - left)) & _MASK
