"""Numbers of 4 bits as matrix units read them, decoded in registers of four warps; in Gluon. See `int4_numbers`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from worker_svc.core.kernels.linear.ways import STREAMED_INT4_OUTPUTS

_OUTPUTS = gl.constexpr(STREAMED_INT4_OUTPUTS // 2)  # of four warps
_INPUTS = gl.constexpr(64)  # half a block's
_WARPS = gl.constexpr(4)
_LOW, _HIGH = gl.constexpr(0x000F000F), gl.constexpr(0x00F000F0)
_DECODE = (
    "{ .reg .b32 up, number, rest; mov.b32 up, POWER; fma.rn.KIND number, $1, up, $2; mul.rn.KIND rest, number, $4; "
    "fma.rn.KIND $0, number, $3, rest; }"
)
# As `int4_numbers` decodes, of pairs: bf16 times 2^126 or 2^122 are numbers times 2^-7, fp16 times 2^15 or 2^11 are
# numbers times 2^-9.
_BF16_LOW, _BF16_HIGH, _FP16_LOW, _FP16_HIGH = (
    gl.constexpr(_DECODE.replace("KIND", kind).replace("POWER", power))
    for kind, power in (
        ("bf16x2", "0x7E807E80"),
        ("bf16x2", "0x7C807C80"),
        ("f16x2", "0x78007800"),
        ("f16x2", "0x68006800"),
    )
)
_BF16_UNIT, _FP16_UNIT = gl.constexpr(2.0**-7), gl.constexpr(2.0**-9)


@gluon.jit
def _twice(values, dtype: gl.constexpr):
    """The bits of f32 as floats of 16 bits, in both halves of an i32."""
    bits = values.to(dtype).to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
    return bits | (bits << 16)


@gluon.jit
def _decoded(words, zero, first, rest, dtype: gl.constexpr, ASM: gl.constexpr):
    """One number of each half of masked words, scaled: [outputs, words, 2]."""
    args = [words, zero, first, rest]
    pairs = gl.inline_asm_elementwise(ASM, "=r,r,r,r,r", args, dtype=gl.int32, is_pure=True, pack=1)
    return gl.join(pairs.to(gl.int16), (pairs >> 16).to(gl.int16)).to(dtype, bitcast=True)


@gluon.jit
def scaling_of(packed, dtype: gl.constexpr):
    """What numbers are decoded with, of scales and zeros of outputs: a scale is in two parts, so that the product is
    rounded once, as the widened weight is.
    """
    UNIT: gl.constexpr = _BF16_UNIT if dtype == gl.bfloat16 else _FP16_UNIT
    scale = (packed & -16).to(gl.float32, bitcast=True) * (1.0 / UNIT)
    whole = scale.to(dtype).to(gl.float32)
    zero = _twice((packed & 15).to(gl.float32) * -UNIT, dtype)
    return zero, _twice(whole, dtype), _twice(scale - whole, dtype)


@gluon.jit
def decode(words, scaling, dtype: gl.constexpr, OPERAND: gl.constexpr):
    """Half a block of 64 outputs, i32[64, 8], and their `scaling_of`, i32[64] each -> [64, 64] as matrix units want it,
    in the order that `end_tile` undoes.
    """
    IS_BF16: gl.constexpr = dtype == gl.bfloat16
    LOW: gl.constexpr = _BF16_LOW if IS_BF16 else _FP16_LOW
    HIGH: gl.constexpr = _BF16_HIGH if IS_BF16 else _FP16_HIGH
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, words.type.layout)
    zero = gl.convert_layout(scaling[0], OF_ROWS, assert_trivial=True)[:, None]
    first = gl.convert_layout(scaling[1], OF_ROWS, assert_trivial=True)[:, None]
    rest = gl.convert_layout(scaling[2], OF_ROWS, assert_trivial=True)[:, None]
    above = words >> 8
    even = gl.join(
        _decoded(words & _LOW, zero, first, rest, dtype, LOW), _decoded(words & _HIGH, zero, first, rest, dtype, HIGH)
    )
    odd = gl.join(
        _decoded(above & _LOW, zero, first, rest, dtype, LOW), _decoded(above & _HIGH, zero, first, rest, dtype, HIGH)
    )
    # Of a row: half of 32 warps' rows, warp, row of eight; of a word: thread of four, 32 inputs, pair, 8 inputs, 16.
    numbers = gl.join(even, odd).reshape([2, _WARPS, 8, 4, 2, 2, 2, 2])
    numbers = numbers.permute(1, 0, 2, 4, 7, 6, 3, 5).reshape([_OUTPUTS, _INPUTS])
    return gl.convert_layout(numbers, OPERAND, assert_trivial=True)


@gluon.jit
def halves(words):
    """Words of a block, i32[64, 16] -> of its first and its last 64 inputs, [64, 8]."""
    low, high = words.reshape([_OUTPUTS, 4, 2, 2]).permute(0, 1, 3, 2).split()
    return low.reshape([_OUTPUTS, 8]), high.reshape([_OUTPUTS, 8])
