"""Blocks of numbers of 4 bits in words, as `formats.words.to_words` has them, and pairs of half floats."""

import triton
import triton.language as tl

from worker_svc.core.kernels.launch import INTERPRETED

BLOCK = 128  # inputs of a row that stand together
WORDS = 16  # that these take
_BLOCK = tl.constexpr(BLOCK)
_ASM = tl.constexpr(not INTERPRETED)  # the interpreter knows no instructions of a device


@triton.jit
def exact(values):
    """Half floats as f32: by their bits, since the interpreter loses small ones."""
    if values.dtype == tl.bfloat16:
        return (values.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return values.to(tl.float32)


@triton.jit
def multiply_add(a, b, c):
    """a * b + c of pairs of half floats, rounded once."""
    if _ASM:
        if a.dtype == tl.bfloat16:
            y = tl.inline_asm_elementwise(
                "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.bfloat16, is_pure=True, pack=2
            )
        else:
            y = tl.inline_asm_elementwise(
                "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.float16, is_pure=True, pack=2
            )
    else:
        y = (exact(a) * exact(b) + exact(c)).to(a.dtype)
    return y


@triton.jit
def halves(words, dtype: tl.constexpr):
    """i32[rows, words] -> half floats [rows, words, 2] with these bits."""
    return tl.join(words.to(tl.int16), (words >> 16).to(tl.int16)).to(dtype, bitcast=True)


@triton.jit
def lower(pairs):
    """The first of each two bf16 in i32, as f32."""
    return (pairs << 16).to(tl.float32, bitcast=True)


@triton.jit
def upper(pairs):
    """The second of each two bf16 in i32, as f32."""
    return (pairs & -65536).to(tl.float32, bitcast=True)


@triton.jit
def multiply_add_words(a, b, c):
    """As `multiply_add`, of two bf16 in each i32."""
    if _ASM:
        y = tl.inline_asm_elementwise(
            "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        low = (lower(a) * lower(b) + lower(c)).to(tl.bfloat16).to(tl.int16, bitcast=True)
        high = (upper(a) * upper(b) + upper(c)).to(tl.bfloat16).to(tl.int16, bitcast=True)
        y = (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)
    return y


@triton.jit
def as_operand(numbers, ROWS: tl.constexpr, WARPS: tl.constexpr):
    """The numbers of a block of ROWS outputs, [ROWS, 16, 2, 2, 2]: by word, half of it, four bits, byte -> [ROWS, 128].

    Rows come out in the order of `in_order`, in which a thread has just those numbers that matrix units want of it.
    """
    HIGH: tl.constexpr = ROWS // (16 * WARPS)
    numbers = tl.reshape(numbers, (HIGH, 2, WARPS, 8, 4, 4, 2, 2, 2))
    numbers = tl.permute(numbers, (0, 2, 1, 3, 5, 8, 7, 4, 6))
    return tl.reshape(numbers, (ROWS, _BLOCK))


@triton.jit
def in_order(values, ROWS: tl.constexpr, WARPS: tl.constexpr):
    """Values of the rows that `as_operand` takes, in the order in which it gives them: [ROWS]."""
    HIGH: tl.constexpr = ROWS // (16 * WARPS)
    return tl.reshape(tl.permute(tl.reshape(values, (HIGH, 2, WARPS, 8)), (0, 2, 1, 3)), (ROWS,))
