"""Numbers of 4 bits as the floats that products read: the layout of `formats.int4`, decoded in registers.

A word's eight numbers become four pairs of floats by a mask each, without an integer being converted: as the bits of a
float's mantissa a small integer is that many of the smallest number there is, and one multiplication and addition of
pairs brings it to its size and takes the zero off, exactly (the same thought, with ones instead of noughts in the
exponent: Kim et al., "Who Says Elephants Can't Run", 2022).
"""

from typing import Protocol

import triton
import triton.language as tl
from torch import Tensor

from worker_svc.core.kernels.launch import INTERPRETED
from worker_svc.core.kernels.words import as_operand, exact, halves, multiply_add, multiply_add_words

_ASM = tl.constexpr(not INTERPRETED)  # the interpreter knows no instructions of a device

_LOW, _HIGH = tl.constexpr(0x000F000F), tl.constexpr(0x00F000F0)  # of each half of a word
# What comes out is (number - zero) times this: the powers of two that bring the smallest floats up have an end.
_BF16_UNIT, _FP16_UNIT = tl.constexpr(2.0**-7), tl.constexpr(2.0**-9)


class Int4Weight(Protocol):
    """A weight [outputs, inputs] in the layout of `formats.int4`."""

    numbers: Tensor  # i32[outputs, blocks, WORDS]
    scales: Tensor  # f32[groups, outputs], with zeros
    group: int | None  # inputs that have a scale; None: all

    @property
    def outputs(self) -> int:
        """Numbers of a row that come out."""

    @property
    def inputs(self) -> int:
        """Numbers of a row that go in."""


@triton.jit
def _multiply(a, b):
    """a * b of pairs of half floats."""
    if _ASM:
        if a.dtype == tl.bfloat16:
            y = tl.inline_asm_elementwise(
                "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.bfloat16, is_pure=True, pack=2
            )
        else:
            y = tl.inline_asm_elementwise(
                "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.float16, is_pure=True, pack=2
            )
    else:
        y = (exact(a) * exact(b)).to(a.dtype)
    return y


@triton.jit
def unit(dtype: tl.constexpr):
    """The number that decoded ones are to be divided by."""
    return _FP16_UNIT if dtype == tl.float16 else _BF16_UNIT


@triton.jit
def scale_of(packed):
    """The scale of groups, f32, of i32 that has the zero, too."""
    return (packed & -16).to(tl.float32, bitcast=True)


@triton.jit
def _negative_zero_of(packed, dtype: tl.constexpr):
    """The zero of groups, negative, in units."""
    if dtype == tl.bfloat16:
        shifted = ((packed & 15) | 0x4300).to(tl.int16).to(tl.bfloat16, bitcast=True)  # 128 + zero
        y = 1.0 - shifted.to(tl.float32) * _BF16_UNIT
    else:
        shifted = ((packed & 15) | 0x6400).to(tl.int16).to(tl.float16, bitcast=True)  # 1024 + zero
        y = 2.0 - shifted.to(tl.float32) * _FP16_UNIT
    return y.to(dtype)


@triton.jit
def _negative_zero_pair(packed):
    """As `_negative_zero_of`, two bf16 in each i32."""
    zeros = _negative_zero_of(packed, tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32)
    return (zeros & 0xFFFF) | (zeros << 16)


@triton.jit
def _decode_pairs(words, packed, dtype: tl.constexpr, IS_HIGH: tl.constexpr, SCALED: tl.constexpr):
    """Masked words [rows, 16] and their groups' scales and zeros, i32[rows, 1 or 16] -> [rows, 16, 2]."""
    half: tl.constexpr = tl.float16 if dtype == tl.float16 else tl.bfloat16
    pairs = halves(words, half)
    of_bf16: tl.constexpr = 2.0**122 if IS_HIGH else 2.0**126
    of_fp16: tl.constexpr = 2.0**11 if IS_HIGH else 2.0**15
    up: tl.constexpr = of_fp16 if half == tl.float16 else of_bf16
    zeros = tl.broadcast_to(_negative_zero_of(packed, half)[:, :, None], pairs.shape)
    numbers = multiply_add(pairs, tl.full(pairs.shape, up, tl.float32).to(half), zeros)
    if dtype == tl.float32:
        numbers = exact(numbers)
        if SCALED:
            numbers *= (scale_of(packed) * (1.0 / unit(dtype)))[:, :, None]
    elif SCALED:
        # A scale in two parts: the product is rounded once, as the widened weight is.
        scale = scale_of(packed) * (1.0 / unit(dtype))
        first = scale.to(dtype)
        rest = (scale - first.to(tl.float32)).to(dtype)
        first = tl.broadcast_to(first[:, :, None], pairs.shape)
        rest = tl.broadcast_to(rest[:, :, None], pairs.shape)
        numbers = multiply_add(numbers, first, _multiply(numbers, rest))
    return numbers


@triton.jit
def decode_words(words, packed, packed_odd, dtype: tl.constexpr, SCALED: tl.constexpr):
    """A block of the numbers of each row, i32[rows, 16] -> [rows, 16, 2, 2, 2]: by word, half of it, four bits, byte,
    of half floats or f32; their scales multiplied, and rounded once, or not, and then exact, in units.

    packed, packed_odd: i32[rows, 1 or 16], the scales and zeros of each word's first 16 inputs and of its others.
    """
    above = words >> 8
    even = tl.join(
        _decode_pairs(words & _LOW, packed, dtype, False, SCALED),
        _decode_pairs(words & _HIGH, packed, dtype, True, SCALED),
    )
    odd = tl.join(
        _decode_pairs(above & _LOW, packed_odd, dtype, False, SCALED),
        _decode_pairs(above & _HIGH, packed_odd, dtype, True, SCALED),
    )
    return tl.join(even, odd)


@triton.jit
def _exact_pairs(masked, zeros, IS_HIGH: tl.constexpr):
    """Masked words i32[rows, 16] and negative zeros, two bf16 in each i32[rows, 1 or 16] -> the same, in units."""
    # 2^122 or 2^126, twice.
    up = tl.full(masked.shape, 0x7C807C80 if IS_HIGH else 0x7E807E80, tl.int32)
    return multiply_add_words(masked, up, tl.broadcast_to(zeros, masked.shape))


@triton.jit
def int4_pairs(words, packed, packed_odd):
    """As `decode_words`, exactly, without scales: two bf16 in each of four i32[rows, 16], of a word's first 16 inputs
    and of its others, by half of these.
    """
    zeros, zeros_odd = _negative_zero_pair(packed), _negative_zero_pair(packed_odd)
    above = words >> 8
    return (
        _exact_pairs(words & _LOW, zeros, False),
        _exact_pairs(words & _HIGH, zeros, True),
        _exact_pairs(above & _LOW, zeros_odd, False),
        _exact_pairs(above & _HIGH, zeros_odd, True),
    )


@triton.jit
def decode(
    words, packed, packed_odd, dtype: tl.constexpr, ROWS: tl.constexpr, WARPS: tl.constexpr, SCALED: tl.constexpr
):
    """As `decode_words`, of ROWS outputs -> [ROWS, 128], rows in the order of `in_order`."""
    return as_operand(decode_words(words, packed, packed_odd, dtype, SCALED), ROWS, WARPS)
