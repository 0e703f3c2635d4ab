"""Weights of experts as kernels read them: floats, 8-bit floats with scales, or floats of 4 bits."""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from worker_svc.core.kernels.launch import INTERPRETED

FLOATS, FP8, FP4 = range(3)
FP4_GROUP = 32  # inputs that share a power of two
_INTERPRETED = tl.constexpr(INTERPRETED)


def _reader(sign: int, rest: int) -> str:
    """Instructions that make four bf16 of four bits of each byte, which are so far from where they belong: the sign at
    the top of 16 bits, the rest where exponent and mantissa meet. That is too small by 2^126.
    """
    pairs = (
        f"shl.b32 sign, {pair}, {sign}; and.b32 sign, sign, 0x80008000; "
        f"shl.b32 rest, {pair}, {rest}; and.b32 rest, rest, 0x01c001c0; "
        f"or.b32 rest, rest, sign; fma.rn.bf16x2 {out}, rest, power, zero;"
        for pair, out in (("ab", "$0"), ("cd", "$1"))
    )
    return f"""
    {{
        .reg .b32 ab, cd, sign, rest, zero, power; mov.b32 zero, 0x80008000; mov.b32 power, 0x7e807e80;
        prmt.b32 ab, $2, 0, 0x4140; prmt.b32 cd, $2, 0, 0x4342;
        {" ".join(pairs)}
    }}
    """


_READ_LOW, _READ_HIGH = tl.constexpr(_reader(12, 6)), tl.constexpr(_reader(8, 2))


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The weights of the products of all experts, [experts, outputs, inputs]."""

    form: int
    numbers: Tensor  # [experts, outputs, inputs]; FP4: u8[experts, outputs, inputs / 2], the lower four bits first
    inputs: int
    exponents: Tensor | None = None  # FP4: u8[experts, outputs, inputs / FP4_GROUP], at most 127, which stands for 1
    scales: Tensor | None = None  # FP8: f32[experts, outputs, groups], FP4: f32[experts, outputs, 1]
    group: int = 0  # FP8: inputs that share a scale; 0: all

    @property
    def count(self) -> int:
        """Experts."""
        return self.numbers.shape[0]

    @property
    def outputs(self) -> int:
        """Numbers of a row that come out of one."""
        return self.numbers.shape[1]


def operands(weight: ExpertWeights, x: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
    """Numbers, exponents, scales and bias as kernels take them; what is not there is never read."""
    exponents, scales = (x if each is None else each for each in (weight.exponents, weight.scales))
    return weight.numbers, exponents, scales, x if bias is None else bias


@triton.jit
def _e2m1(bits):
    """The floats that numbers of 4 bits stand for, in fp32."""
    magnitude = bits & 7
    small = (magnitude & 1).to(tl.float32) * 0.5
    large = (((magnitude >> 1) + 126) << 23 | (magnitude & 1) << 22).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 2, small, large)
    return tl.where(bits & 8 != 0, -value, value)


@triton.jit
def read_fp4(packed, dtype: tl.constexpr):
    """packed u8[...] -> the floats in the lower and in the upper bits of each byte, without their powers of two."""
    if _INTERPRETED or dtype != tl.bfloat16:
        bits = packed.to(tl.int32)
        low, high = _e2m1(bits & 15).to(dtype), _e2m1(bits >> 4).to(dtype)
    else:
        low = tl.inline_asm_elementwise(_READ_LOW, "=r,=r,r", [packed], dtype=tl.bfloat16, is_pure=True, pack=4)
        high = tl.inline_asm_elementwise(_READ_HIGH, "=r,=r,r", [packed], dtype=tl.bfloat16, is_pure=True, pack=4)
    return low, high


@triton.jit
def power_of_two(exponents):
    """exponents u8 -> f32: 127 stands for 1; of 0 it is zero."""
    return (exponents.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def add_fp4_product(sums, packed, exponents, x):
    """sums + weight @ x [inputs, rows]: packed u8[outputs, inputs / 2], exponents u8[outputs, inputs / FP4_GROUP]."""
    if _INTERPRETED:
        OUTPUTS: tl.constexpr = packed.shape[0]
        INPUTS: tl.constexpr = 2 * packed.shape[1]
        GROUPS: tl.constexpr = exponents.shape[1]
        low, high = read_fp4(packed, tl.float32)
        numbers = tl.join(low, high).reshape(OUTPUTS, GROUPS, INPUTS // GROUPS)
        weight = (numbers * power_of_two(exponents)[:, :, None]).reshape(OUTPUTS, INPUTS)
        sums = tl.dot(weight.to(x.dtype), x, sums)
    else:
        form: tl.constexpr = "bf16" if x.dtype == tl.bfloat16 else "fp16"
        sums = tl.dot_scaled(packed, exponents, "e2m1", x, None, form, sums, fast_math=True)
    return sums


@triton.jit
def read(numbers_ptr, is_output, is_input, EVEN: tl.constexpr, NOTHING: tl.constexpr = 0.0):
    """A tile of numbers, NOTHING where there is none; EVEN: no inputs are missing."""
    if EVEN:
        return tl.load(numbers_ptr, mask=is_output, other=NOTHING)
    else:  # noqa: RET505  (the compiler would go on after the return)
        return tl.load(numbers_ptr, mask=is_output & is_input, other=NOTHING)
