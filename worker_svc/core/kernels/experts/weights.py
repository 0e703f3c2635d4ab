"""Weights of experts as kernels read them: floats, 8-bit floats with scales, or floats or integers of 4 bits."""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from worker_svc.core.kernels.linear.int4_numbers import scale_of, unit
from worker_svc.core.kernels.words import BLOCK, WORDS, exact, halves, multiply_add, multiply_add_words

FLOATS, FP8, FP4, INT4 = range(4)
TOGETHER = 16  # outputs of which FP4 and INT4 have a block side by side
_INT4 = tl.constexpr(INT4)
_BLOCK, _WORDS, _TOGETHER = tl.constexpr(BLOCK), tl.constexpr(WORDS), tl.constexpr(TOGETHER)
# Of two bf16: all bits that a number has, those of its sign and its exponent, and that of its mantissa.
_ALL, _SIGNS_AND_TOPS, _LOWS = tl.constexpr(-0x7E3F7E40), tl.constexpr(-0x7E7F7E80), tl.constexpr(0x00400040)
_TWICE = tl.constexpr(0x00800080)  # times the bits of an exponent: two bf16 with it


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The weights of the products of all experts, [experts, outputs, inputs]."""

    form: int
    # [experts, outputs, inputs]; FP4, INT4: i32[experts, outputs / TOGETHER, blocks, TOGETHER, WORDS]
    numbers: Tensor
    inputs: int
    exponents: Tensor | None = None  # FP4: i32[as numbers, but for WORDS], four bytes each: at most 127, which is for 1
    # FP8: f32[experts, outputs, groups], FP4: f32[experts, outputs, 1]; INT4: i32[experts, blocks or larger groups,
    # outputs, groups of a block or 1], with zeros
    scales: Tensor | None = None
    group: int = 0  # FP8, INT4: inputs that share a scale; 0: all

    @property
    def count(self) -> int:
        """Experts."""
        return self.numbers.shape[0]

    @property
    def outputs(self) -> int:
        """Numbers of a row that come out of one."""
        if self.scales is None:
            return self.numbers.shape[1]
        return self.scales.shape[2 if self.form == INT4 else 1]


def operands(weight: ExpertWeights, x: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
    """Numbers, exponents, scales and bias as kernels take them; what is not there is never read."""
    exponents, scales = (x if each is None else each for each in (weight.exponents, weight.scales))
    return weight.numbers, exponents, scales, x if bias is None else bias


@triton.jit
def _rotated(words, LEFT: tl.constexpr):
    """Words i32 rotated by so many bits."""
    bits = words.to(tl.uint32, bitcast=True)
    return ((bits << LEFT) | (bits >> (32 - LEFT))).to(tl.int32, bitcast=True)


@triton.jit
def _pairs(words):
    """The four pairs of numbers of each word, with their bits where two bf16 have theirs: four of i32[rows, 16]."""
    # The rotations of `formats.stacked.fp4`.
    last = (_rotated(words, 26) & _SIGNS_AND_TOPS) | ((words << 2) & _LOWS)
    return words & _ALL, (words << 6) & _ALL, _rotated(words, 28) & _ALL, last


@triton.jit
def _powers(exponents):
    """What the numbers of each word are multiplied with, two bf16 in i32[rows, 16]; words are of a block's groups in
    turn.
    """
    shifts = tl.arange(0, _WORDS) % 4 * 8
    return ((exponents >> shifts[None, :]) & 0xFF) * _TWICE + 126 * _TWICE


@triton.jit
def _floats(pairs, powers, dtype: tl.constexpr):
    """Pairs of numbers with their bits where a bf16 has its, i32[rows, 16], times powers bf16[rows, 16, 2]."""
    # They are too small by 2^126, subnormal ones, too; powers are too large by that.
    numbers = halves(pairs, tl.bfloat16)
    if dtype == tl.bfloat16:
        # Zeros keep their sign.
        numbers = multiply_add(numbers, powers, tl.full(numbers.shape, -0.0, tl.float32).to(dtype))
    else:
        numbers = (exact(numbers) * exact(powers)).to(dtype)
    return numbers


@triton.jit
def decode_fp4(words, exponents, dtype: tl.constexpr):
    """words i32[rows, 16], exponents i32[rows, 1], both of a block of inputs -> the floats that they stand for, but for
    the scale of their output, [rows, 16, 2, 2, 2]: by word, half of it, and place of the pair.
    """
    powers, pairs = halves(_powers(exponents), tl.bfloat16), _pairs(words)
    even = tl.join(_floats(pairs[0], powers, dtype), _floats(pairs[1], powers, dtype))
    odd = tl.join(_floats(pairs[2], powers, dtype), _floats(pairs[3], powers, dtype))
    return tl.join(even, odd)


@triton.jit
def fp4_pairs(words, exponents):
    """As `decode_fp4`, as two bf16 in each of four i32[rows, 16], exactly: by half of a word and place of the pair."""
    powers, pairs = _powers(exponents), _pairs(words)
    zero = tl.full(words.shape, -0x7FFF8000, tl.int32)  # negative, so that zeros keep their sign
    return (
        multiply_add_words(pairs[0], powers, zero),
        multiply_add_words(pairs[1], powers, zero),
        multiply_add_words(pairs[2], powers, zero),
        multiply_add_words(pairs[3], powers, zero),
    )


@triton.jit
def decode_fp4_exactly(words, exponents, dtype: tl.constexpr):
    """As `decode_fp4`, in fp32, not rounded; dtype: to which they are rounded then."""
    # Half floats of 16 bits have no powers as small as these may be.
    return decode_fp4(words, exponents, tl.bfloat16 if dtype == tl.bfloat16 else tl.float32).to(tl.float32)


@triton.jit
def _places(rows, experts, blocks, OUTPUTS: tl.constexpr, K: tl.constexpr):
    """The places of blocks of the weights `rows` among all, of which those of TOGETHER outputs stand side by side.

    rows i64[rows, 1], of the OUTPUTS of all experts; their experts and blocks are numbers or like them.
    """
    COUNT: tl.constexpr = (K + _BLOCK - 1) // _BLOCK
    FILLED: tl.constexpr = (OUTPUTS + _TOGETHER - 1) // _TOGETHER * _TOGETHER
    outputs = rows - experts * OUTPUTS
    first = outputs // _TOGETHER * _TOGETHER
    return experts * (FILLED * COUNT) + first * COUNT + blocks * _TOGETHER + (outputs - first)


@triton.jit
def read_fp4(numbers_ptr, exponents_ptr, rows, experts, blocks, is_there, OUTPUTS: tl.constexpr, K: tl.constexpr):
    """Words i32[rows, 16] and exponents i32[rows, 1] of blocks of the weights `rows`, noughts where there is none; as
    `_places` takes them.
    """
    places = _places(rows, experts, blocks, OUTPUTS, K)
    words = tl.load(numbers_ptr + places * _WORDS + tl.arange(0, _WORDS)[None, :], mask=is_there, other=0)
    ROWS: tl.constexpr = rows.shape[0]
    places, is_row = tl.reshape(places, (ROWS,)), tl.reshape(is_there, (ROWS,))
    return words, tl.load(exponents_ptr + places, mask=is_row, other=0)[:, None]


@triton.jit
def read_int4(
    numbers_ptr,
    scales_ptr,
    rows,
    experts,
    blocks,
    is_there,
    OUTPUTS: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """As `read_fp4`: words, and scales with zeros of their first 16 inputs and of their others, as `decode_words` takes
    all three.
    """
    places = _places(rows, experts, blocks, OUTPUTS, K)
    words = tl.load(numbers_ptr + places * _WORDS + tl.arange(0, _WORDS)[None, :], mask=is_there, other=0)
    packed = read_int4_scales(scales_ptr, rows, experts, blocks, is_there, OUTPUTS, K, GROUP, False)
    odd = packed
    if GROUP == 16:
        odd = read_int4_scales(scales_ptr, rows, experts, blocks, is_there, OUTPUTS, K, GROUP, True)
    return words, packed, odd


@triton.jit
def read_int4_scales(
    scales_ptr,
    rows,
    experts,
    blocks,
    is_there,
    OUTPUTS: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    ODD: tl.constexpr,
):
    """Scales with zeros: i32[rows, 1], or of groups that are smaller than a block for each of its words, [rows, 16].
    ODD: of words' last 16 inputs.
    """
    places = rows
    if GROUP > 0:
        STEP: tl.constexpr = GROUP if GROUP >= _BLOCK else _BLOCK
        STEPS: tl.constexpr = (K + STEP - 1) // STEP
        # Of an expert steps follow each other, and of a step its outputs.
        places = rows + (experts * (STEPS - 1) + blocks * _BLOCK // STEP) * OUTPUTS
    if GROUP == 0 or GROUP >= _BLOCK:
        packed = tl.load(scales_ptr + places, mask=is_there, other=0)
    else:
        ROWS: tl.constexpr = rows.shape[0]
        # A word has numbers of two sixteens of inputs, 32 apart from the next word's.
        groups = (tl.arange(0, 4) * 32 + (16 if ODD else 0)) // GROUP
        packed = tl.load(scales_ptr + places * (_BLOCK // GROUP) + groups[None, :], mask=is_there, other=0)
        packed = tl.reshape(tl.broadcast_to(packed[:, None, :], (ROWS, 4, 4)), (ROWS, _WORDS))
    return packed


@triton.jit
def output_scales(scales_ptr, rows, is_output, FORM: tl.constexpr, dtype: tl.constexpr):
    """The scale of each output of the weights `rows`, like these, where all its inputs share it: of numbers that were
    decoded to `dtype`.
    """
    if FORM == _INT4:
        scales = scale_of(tl.load(scales_ptr + rows, mask=is_output, other=0)) * (1.0 / unit(dtype))
    else:
        scales = tl.load(scales_ptr + rows, mask=is_output, other=0.0)
    return scales


@triton.jit
def read(numbers_ptr, is_output, is_input, EVEN: tl.constexpr):
    """A tile of numbers, zero where there is none; EVEN: no inputs are missing."""
    if EVEN:
        return tl.load(numbers_ptr, mask=is_output, other=0.0)
    else:  # noqa: RET505  (the compiler would go on after the return)
        return tl.load(numbers_ptr, mask=is_output & is_input, other=0.0)
