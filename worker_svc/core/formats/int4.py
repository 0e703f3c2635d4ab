"""Integers of 4 bits with a scale and a zero for each group of inputs, as kernels multiply them."""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812  (the name that torch's own documentation uses)
from torch import Tensor

from worker_svc.core.formats.interface import OUT, Dim, Piece, StoredFormat, Tensors
from worker_svc.core.formats.words import (
    BLOCK,
    WORD,
    WORD_BITS,
    WORDS,
    from_words,
    groups,
    same_bits,
    spread,
    to_words,
    unpack,
)

INT4_BITS = 4
_ZERO_MASK = 15  # of a scale's bits: those of the zero
NUMBERS, SCALES = "numbers", "scales_and_zeros"  # suffixes of tensors
_EVEN_ZERO, _EVEN_DEVIATION = 8, 85**0.5 / 2  # of numbers from 0 to 15 that are as frequent as each other


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
    """Implement `Packed`: the words of `to_words`, with their numbers one after the other from the lowest bits on."""

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
        numbers = from_words(unpack(self.numbers, INT4_BITS, 2))[:, : self._inputs]
        bits = self.scales.t().contiguous().view(WORD)
        zeros, scales = bits & _ZERO_MASK, (bits & ~_ZERO_MASK).view(torch.float32)
        zeros, scales = (spread(each, self.group, 1, self._inputs) for each in (zeros, scales))
        return ((numbers - zeros) * scales).to(dtype)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Implement `Packed.multiply`."""
        return F.linear(x, self.widen(x.dtype), bias)

    def scale_outputs(self, factor: float) -> None:
        """Implement `Packed.scale_outputs`."""
        self.scales.copy_(multiply_scales(self.scales, factor))

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
            Piece(NUMBERS, (OUT, Dim("in", BLOCK), Dim("none", WORDS)), WORD),
            Piece(SCALES, (groups(self.group), OUT), torch.float32),
        )

    def widen(self, tensors: Tensors) -> Tensor:
        """Implement `StoredFormat.widen`."""
        return self.pack(tensors, tensors[NUMBERS].shape[1] * BLOCK).widen(torch.float32)

    def pack(self, tensors: Tensors, inputs: int) -> Int4:
        """Implement `Format.pack`."""
        return Int4(tensors[NUMBERS], tensors[SCALES], inputs, self.group)


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
        return _tensors(self.stored.read(tensors))


def pack_integers(integers: Integers, inputs: int, group: int | None) -> Int4:
    """Integers of 4 bits, packed."""
    tensors = {suffix: tensor.contiguous() for suffix, tensor in _tensors(integers).items()}
    return Int4Format(group).pack(tensors, inputs)


def multiply_scales(packed: Tensor, factor: float) -> Tensor:
    """Scales with zeros, f32, whose scales are multiplied by `factor`."""
    bits = packed.view(WORD)
    return _with_zeros((bits & ~_ZERO_MASK).view(torch.float32) * factor, bits & _ZERO_MASK)


def even_scales(like: Tensor, deviation: float) -> Tensor:
    """Scales with zeros, f32, with which numbers of all values, evenly drawn, give weights of this deviation."""
    zeros = torch.full_like(like, _EVEN_ZERO, dtype=WORD)
    return _with_zeros(torch.full_like(like, deviation / _EVEN_DEVIATION), zeros)


def widen_integers(integers: Integers, group: int | None) -> Tensor:
    """The weight, f32[outputs, inputs]."""
    count = integers.numbers.shape[1]
    zeros, scales = (spread(each, group, 1, count) for each in (integers.zeros, integers.scales))
    return (integers.numbers - zeros) * scales


def _tensors(integers: Integers) -> Tensors:
    return {NUMBERS: _pack(integers.numbers), SCALES: _with_zeros(integers.scales, integers.zeros).t()}


def _pack(numbers: Tensor) -> Tensor:
    """i32[outputs, inputs] -> i32[outputs, blocks, WORDS]."""
    shifts = torch.arange(0, WORD_BITS, INT4_BITS, dtype=WORD, device=numbers.device)
    return (to_words(numbers) << shifts).sum(-1, dtype=WORD)


def _with_zeros(scales: Tensor, zeros: Tensor) -> Tensor:
    """f32 of 20 bits and i32 from 0 to 15 -> f32 that has both."""
    rounded = (same_bits(scales.float().contiguous(), WORD) + (_ZERO_MASK + 1) // 2) & ~_ZERO_MASK
    return same_bits(rounded | zeros, torch.float32)
