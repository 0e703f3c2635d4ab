"""Integers of 4 bits with a scale and a zero for each group of inputs, as kernels multiply them."""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812  (the name that torch's own documentation uses)
from torch import Tensor

from worker_svc.core.formats.interface import OUT, Dim, Piece, StoredFormat, Tensors
from worker_svc.core.formats.words import WORD, groups, spread

BLOCK = 128  # inputs of a row that stand together
WORDS = BLOCK // 8  # that have them
INT4_BITS = 4
_PER_WORD = 8
_OUTPUTS, _SMALL_GROUPS = 128, (16, 32, 64)  # of which kernels have tiles; gates and ups are half of the outputs each
_ZERO_MASK = 15  # of a scale's bits: those of the zero
_NUMBERS, _SCALES = "numbers", "scales"


@dataclass(frozen=True, slots=True)
class Integers:
    """A weight (numbers - zeros) * scales."""

    numbers: Tensor  # i32[outputs, inputs], from 0 to 15 if they are of 4 bits
    zeros: Tensor  # i32[outputs, groups], likewise
    scales: Tensor  # f32[outputs, groups]


class IntegersFormat(StoredFormat, Protocol):
    """A way to store a linear layer as integers."""

    @property
    def is_int4(self) -> bool:
        """Return whether they have 4 bits, and the inputs of a group follow each other."""

    @property
    def group(self) -> int | None:
        """Inputs of a group; None: all."""

    def read(self, tensors: Tensors) -> Integers:
        """The integers."""


class Int4:
    """Implement `Packed`.

    A row's inputs stand in blocks of 128, of which each word has eight in the order in which matrix units want them:
    bits 16 s + 8 e + 4 h and the next three of the word 4 t + v are input 32 v + 16 e + 8 h + 2 t + s of the block.
    """

    def __init__(self, numbers: Tensor, scales: Tensor, inputs: int, group: int | None) -> None:
        self.numbers = numbers  # i32[outputs, blocks, WORDS]
        self.scales = scales  # f32[groups, outputs]; the lowest four bits of each are the group's zero
        self._inputs = inputs
        self.group = group

    @property
    def outputs(self) -> int:
        """Implement `Packed.outputs`."""
        return self.numbers.shape[0]

    @property
    def inputs(self) -> int:
        """Implement `Packed.inputs`."""
        return self._inputs

    def widen(self, dtype: torch.dtype) -> Tensor:
        """The weight, rounded once, [outputs, inputs]."""
        numbers = _unpack(self.numbers)[:, : self._inputs]
        bits = self.scales.t().contiguous().view(WORD)
        zeros, scales = bits & _ZERO_MASK, (bits & ~_ZERO_MASK).view(torch.float32)
        zeros, scales = (spread(each, self.group, 1, self._inputs) for each in (zeros, scales))
        return ((numbers - zeros) * scales).to(dtype)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Implement `Packed.multiply`."""
        return F.linear(x, self.widen(x.dtype), bias)

    def scale_outputs(self, factor: float) -> None:
        """Implement `Packed.scale_outputs`."""
        bits = self.scales.view(WORD)
        scales = (bits & ~_ZERO_MASK).view(torch.float32) * factor
        self.scales.copy_(_with_zeros(scales, bits & _ZERO_MASK))

    def reorder_outputs(self, order: Tensor) -> None:
        """Implement `Packed.reorder_outputs`."""
        self.numbers.copy_(self.numbers[order])
        self.scales.copy_(self.scales[:, order])


@dataclass(frozen=True, slots=True)
class Int4Format:
    """Implement `Format`."""

    group: int | None

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Implement `StoredFormat.pieces`."""
        return (
            Piece(_NUMBERS, (OUT, Dim("in", BLOCK), Dim("none", WORDS)), WORD),
            Piece(_SCALES, (groups(self.group), OUT), torch.float32),
        )

    def widen(self, tensors: Tensors) -> Tensor:
        """Implement `StoredFormat.widen`."""
        return self.pack(tensors, tensors[_NUMBERS].shape[1] * BLOCK).widen(torch.float32)

    def takes(self, outputs: int, inputs: int) -> bool:
        """Implement `Format.takes`: whole tiles of outputs, and blocks of inputs; nothing but kernels multiplies it."""
        in_groups = self.group is None or self.group % BLOCK == 0 or self.group in _SMALL_GROUPS
        return outputs % _OUTPUTS == 0 and inputs % BLOCK == 0 and in_groups

    def pack(self, tensors: Tensors, inputs: int) -> Int4:
        """Implement `Format.pack`."""
        return Int4(tensors[_NUMBERS], tensors[_SCALES], inputs, self.group)


@dataclass(frozen=True, slots=True)
class ToInt4:
    """Implement `ConvertedFormat`: of any that stores integers of 4 bits."""

    stored: IntegersFormat
    needs_whole_rows: bool = False

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Implement `StoredFormat.pieces`."""
        return self.stored.pieces

    @property
    def multiplied(self) -> Int4Format:
        """Implement `ConvertedFormat.multiplied`."""
        return Int4Format(self.stored.group)

    def widen(self, tensors: Tensors) -> Tensor:
        """Implement `StoredFormat.widen`."""
        return self.stored.widen(tensors)

    def convert(self, tensors: Tensors) -> Tensors:
        """Implement `ConvertedFormat.convert`; a scale is rounded to 20 bits, which those in half precision have."""
        found = self.stored.read(tensors)
        return {_NUMBERS: _pack(found.numbers), _SCALES: _with_zeros(found.scales, found.zeros).t()}


def widen_integers(integers: Integers, group: int | None) -> Tensor:
    """The weight, f32[outputs, inputs]."""
    count = integers.numbers.shape[1]
    zeros, scales = (spread(each, group, 1, count) for each in (integers.zeros, integers.scales))
    return (integers.numbers - zeros) * scales


def _pack(numbers: Tensor) -> Tensor:
    """i32[outputs, inputs] -> i32[outputs, blocks, WORDS]; a last block that is not full ends in noughts."""
    blocks = -(-numbers.shape[1] // BLOCK)
    numbers = F.pad(numbers, (0, blocks * BLOCK - numbers.shape[1]))
    # v, e, h, t, s -> t, v, s, e, h
    places = numbers.view(len(numbers), blocks, 4, 2, 2, 4, 2).permute(0, 1, 5, 2, 6, 3, 4).flatten(4)
    places = places.reshape(len(numbers), blocks, WORDS, _PER_WORD)
    shifts = torch.arange(0, _PER_WORD * INT4_BITS, INT4_BITS, dtype=WORD, device=numbers.device)
    return (places << shifts).sum(-1, dtype=WORD)


def _unpack(words: Tensor) -> Tensor:
    """Undo `_pack`, but for the noughts."""
    outputs, blocks, _ = words.shape
    shifts = torch.arange(0, _PER_WORD * INT4_BITS, INT4_BITS, dtype=WORD, device=words.device)
    numbers = (words.unsqueeze(-1) >> shifts) & ((1 << INT4_BITS) - 1)
    # t, v, s, e, h -> v, e, h, t, s
    return numbers.view(outputs, blocks, 4, 4, 2, 2, 2).permute(0, 1, 3, 5, 6, 2, 4).reshape(outputs, -1)


def _with_zeros(scales: Tensor, zeros: Tensor) -> Tensor:
    """f32 of 20 bits and i32 from 0 to 15 -> f32 that has both."""
    rounded = (scales.float().contiguous().view(WORD) + (_ZERO_MASK + 1) // 2) & ~_ZERO_MASK
    return (rounded | zeros).view(torch.float32)
