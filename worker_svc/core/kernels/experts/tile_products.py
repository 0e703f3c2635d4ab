"""One tile of the products of an expert's pairs, on tensor cores."""

import triton
import triton.language as tl

from worker_svc.core.kernels.experts.activation import gated
from worker_svc.core.kernels.experts.weights import (
    FLOATS,
    FP4,
    INT4,
    decode_fp4,
    output_scales,
    read,
    read_fp4,
    read_int4,
    read_int4_scales,
)
from worker_svc.core.kernels.linear.int4_numbers import decode, scale_of, unit
from worker_svc.core.kernels.words import BLOCK, as_operand, in_order

_FLOATS, _FP4, _INT4 = tl.constexpr(FLOATS), tl.constexpr(FP4), tl.constexpr(INT4)
_BLOCK = tl.constexpr(BLOCK)


@triton.jit
def _load_pairs(order_ptr, first, count, BLOCK_M: tl.constexpr):
    """Those of a tile, i64[BLOCK_M], and [1, BLOCK_M] which are there."""
    places = tl.arange(0, BLOCK_M)
    pairs = tl.load(order_ptr + first + places, mask=places < count, other=0).to(tl.int64)
    return pairs, (places < count)[None, :]


@triton.jit
def _add_product(
    sums,
    rows,  # i64[outputs, 1]: of the weights of all experts
    expert,  # theirs
    x,  # [inputs, pairs]
    numbers_ptr,
    exponents_ptr,
    scales_ptr,
    k,
    is_output,
    OUTPUTS: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    SCALED: tl.constexpr,
    EVEN: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Those of one step's inputs more, from k on; of FP4 and INT4 a block's, in the order of `_given`."""
    if FORM == _FP4:
        words, exponents = read_fp4(numbers_ptr, exponents_ptr, rows, expert, k // _BLOCK, is_output, OUTPUTS, K)
        numbers = decode_fp4(words, exponents, x.dtype)
        sums = tl.dot(as_operand(numbers, rows.shape[0], WARPS), x, sums)
    elif FORM == _INT4:
        sums = _add_int4(
            sums, rows, expert, x, numbers_ptr, scales_ptr, k // _BLOCK, is_output, OUTPUTS, K, GROUP, SCALED, WARPS
        )
    else:
        inputs = k + tl.arange(0, BLOCK_K)[None, :]
        weight = read(numbers_ptr + rows * K + inputs, is_output, inputs < K, EVEN).to(x.dtype)
        if GROUP > 0:
            scales = scales_ptr + rows * ((K + GROUP - 1) // GROUP) + k // GROUP
            sums += tl.dot(weight, x) * tl.load(scales, mask=is_output, other=0.0)
        else:
            sums = tl.dot(weight, x, sums)
    return sums


@triton.jit
def _add_int4(
    sums,
    rows,
    expert,
    x,
    numbers_ptr,
    scales_ptr,
    block,
    is_output,
    OUTPUTS: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    SCALED: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Those of a block's inputs more. SCALED: scales are multiplied with numbers; else a block's with its part of the
    sum, and one of all inputs last (`_scaled`).
    """
    ROWS: tl.constexpr = rows.shape[0]
    words, packed, odd = read_int4(numbers_ptr, scales_ptr, rows, expert, block, is_output, OUTPUTS, K, GROUP)
    numbers = decode(words, packed, odd, x.dtype, ROWS, WARPS, SCALED)
    if SCALED or GROUP == 0:
        sums = tl.dot(numbers, x, sums)
    else:
        rows = in_order(tl.reshape(rows, (ROWS,)), ROWS, WARPS)[:, None]
        is_output = rows - expert * OUTPUTS < OUTPUTS
        packed = read_int4_scales(scales_ptr, rows, expert, block, is_output, OUTPUTS, K, GROUP, False)
        sums += tl.dot(numbers, x) * (scale_of(packed) * (1.0 / unit(x.dtype)))
    return sums


@triton.jit
def _given(outputs, FORM: tl.constexpr, WARPS: tl.constexpr):
    """Outputs in the order in which products have them."""
    if FORM == _FP4 or FORM == _INT4:  # noqa: PLR1714, SIM109  (the compiler knows no sets)
        outputs = in_order(outputs, outputs.shape[0], WARPS)
    return outputs


@triton.jit
def _scaled(sums, rows, scales_ptr, is_output, DTYPE: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr):
    """Products by what each output has."""
    if FORM != _FLOATS and GROUP == 0:
        sums *= output_scales(scales_ptr, rows, is_output, FORM, DTYPE)
    return sums


@triton.jit
def gate_tile(
    x_ptr,
    numbers_ptr,
    exponents_ptr,
    scales_ptr,
    bias_ptr,
    order_ptr,
    weights_ptr,
    out_ptr,
    expert,
    count,
    first,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    WARPS: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    SCALED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BIAS: tl.constexpr,
    WEIGHS: tl.constexpr,
    SORTED: tl.constexpr,
):
    """See `_gate_tiles`: for at most BLOCK_M pairs of an expert, from `first` of `order` on."""
    pairs, is_pair = _load_pairs(order_ptr, first, count, BLOCK_M)
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output = (outputs < N)[:, None]
    inputs = tl.arange(0, BLOCK_K)
    xs = x_ptr + (pairs // TOP_K)[None, :] * K + inputs[:, None]
    rows = expert * 2 * N + outputs[:, None]
    EVEN: tl.constexpr = K % BLOCK_K == 0
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    gate = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        x = read(xs + k, is_pair, (inputs + k < K)[:, None], EVEN)
        gate = _add_product(
            gate, rows, expert, x, numbers_ptr, exponents_ptr, scales_ptr, k, is_output,
            2 * N, K, BLOCK_K, FORM, GROUP, SCALED, EVEN, WARPS,
        )  # fmt: skip
        up = _add_product(
            up, rows + N, expert, x, numbers_ptr, exponents_ptr, scales_ptr, k, is_output,
            2 * N, K, BLOCK_K, FORM, GROUP, SCALED, EVEN, WARPS,
        )  # fmt: skip
    outputs = _given(outputs, FORM, WARPS)
    is_output = (outputs < N)[:, None]
    rows = expert * 2 * N + outputs[:, None]
    gate = _scaled(gate, rows, scales_ptr, is_output, DTYPE, FORM, GROUP)
    up = _scaled(up, rows + N, scales_ptr, is_output, DTYPE, FORM, GROUP)
    if WEIGHS:
        weights = tl.load(weights_ptr + pairs)[None, :]
        gate *= weights
        up *= weights
    if BIAS:
        biases = bias_ptr + expert * 2 * N + outputs[:, None]
        gate += tl.load(biases, mask=is_output, other=0.0).to(tl.float32)
        up += tl.load(biases + N, mask=is_output, other=0.0).to(tl.float32)
    out = gated(gate, up, ACTIVATION).to(DTYPE)
    if SORTED:
        pairs = first + tl.arange(0, BLOCK_M)
    tl.store(out_ptr + pairs[None, :] * N + outputs[:, None], out, mask=is_pair & is_output)


@triton.jit
def multiply_tile(
    x_ptr,
    numbers_ptr,
    exponents_ptr,
    scales_ptr,
    bias_ptr,
    order_ptr,
    weights_ptr,
    out_ptr,
    expert,
    count,
    first,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    WARPS: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    WEIGHS: tl.constexpr,
):
    """See `_multiply_tiles`: for at most BLOCK_M pairs of an expert, from `first` of `order` on."""
    pairs, is_pair = _load_pairs(order_ptr, first, count, BLOCK_M)
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output = (outputs < N)[:, None]
    inputs = tl.arange(0, BLOCK_K)
    xs = x_ptr + pairs[None, :] * K + inputs[:, None]
    rows = expert * N + outputs[:, None]
    EVEN: tl.constexpr = K % BLOCK_K == 0
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    product = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        x = read(xs + k, is_pair, (inputs + k < K)[:, None], EVEN)
        product = _add_product(
            product, rows, expert, x, numbers_ptr, exponents_ptr, scales_ptr, k, is_output,
            N, K, BLOCK_K, FORM, GROUP, SCALED, EVEN, WARPS,
        )  # fmt: skip
    outputs = _given(outputs, FORM, WARPS)
    is_output = (outputs < N)[:, None]
    rows = expert * N + outputs[:, None]
    product = _scaled(product, rows, scales_ptr, is_output, DTYPE, FORM, GROUP)
    if BIAS:
        bias = tl.load(bias_ptr + expert * N + outputs[:, None], mask=is_output, other=0.0)
        product += bias.to(tl.float32)
    if WEIGHS:
        product *= tl.load(weights_ptr + pairs)[None, :]
    out = product.to(DTYPE)
    tl.store(out_ptr + pairs[None, :] * N + outputs[:, None], out, mask=is_pair & is_output)
