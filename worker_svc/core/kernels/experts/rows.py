"""Products of a few pairs of rows and experts with stored weights, without tensor cores: at about the speed at which
the weights can be read, where tiles would be almost empty. Each pair reads its expert's weights by itself. Floats have
kernels of their own (`float_rows`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker_svc.core.kernels.experts.activation import ACTIVATIONS, gated_pair
from worker_svc.core.kernels.experts.float_rows import add_float_rows, gate_float_rows
from worker_svc.core.kernels.experts.routing import Routed
from worker_svc.core.kernels.experts.tuning import ADD_ROWS, GATE_ROWS, MOST_ROW_PAIRS
from worker_svc.core.kernels.experts.weights import (
    FLOATS,
    FP4,
    INT4,
    ExpertWeights,
    decode_fp4_exactly,
    operands,
    output_scales,
    read_fp4,
    read_int4,
)
from worker_svc.core.kernels.launch import has_dependent_launch, options, release, wait
from worker_svc.core.kernels.linear.int4_numbers import decode_words, scale_of, unit
from worker_svc.core.kernels.words import BLOCK, WORDS

_FP4, _INT4 = tl.constexpr(FP4), tl.constexpr(INT4)
_BLOCK, _WORDS = tl.constexpr(BLOCK), tl.constexpr(WORDS)


def takes_rows(weight: ExpertWeights, num_pairs: int) -> bool:
    """Return whether products of so many pairs are computed here."""
    return num_pairs <= MOST_ROW_PAIRS[weight.form]


@triton.jit
def _partial(
    x_ptr,
    rows,  # i64[BLOCK_N]: of the weights of all experts
    expert,  # theirs
    is_output,
    numbers_ptr,
    exponents_ptr,
    scales_ptr,
    k,
    OUTPUTS: tl.constexpr,
    K: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """f32[BLOCK_N]: the sums over BLOCK_K inputs from k on."""
    if FORM == _FP4 or FORM == _INT4:  # noqa: PLR1714, SIM109  (the compiler knows no sets)
        COUNT: tl.constexpr = (K + _BLOCK - 1) // _BLOCK
        BLOCKS: tl.constexpr = BLOCK_K // _BLOCK
        BLOCK_N: tl.constexpr = rows.shape[0]
        block = k // _BLOCK + tl.arange(0, BLOCKS)
        ALL: tl.constexpr = (BLOCK_N * BLOCKS, 1)
        is_there = tl.reshape(is_output[:, None] & (block < COUNT)[None, :], ALL)
        of_block = tl.reshape(tl.broadcast_to(rows[:, None], (BLOCK_N, BLOCKS)), ALL)
        blocks = tl.reshape(tl.broadcast_to(block[None, :], (BLOCK_N, BLOCKS)), ALL)
        inputs = k + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + inputs, mask=inputs < K, other=0.0)
        # In the order of words: v, e, h, t, s -> t, v, s, h, e.
        x = tl.permute(tl.reshape(x, (BLOCKS, 4, 2, 2, 4, 2)), (0, 4, 1, 5, 3, 2))
        x = tl.reshape(x, (BLOCK_K,)).to(tl.float32)
        if FORM == _FP4:
            words, exponents = read_fp4(numbers_ptr, exponents_ptr, of_block, expert, blocks, is_there, OUTPUTS, K)
            numbers = tl.reshape(decode_fp4_exactly(words, exponents, DTYPE), (BLOCK_N, BLOCK_K))
            sums = tl.sum(numbers * x[None, :], 1)
        else:
            words, packed, odd = read_int4(
                numbers_ptr, scales_ptr, of_block, expert, blocks, is_there, OUTPUTS, K, GROUP
            )
            numbers = tl.reshape(decode_words(words, packed, odd, tl.float32, False), (BLOCK_N, BLOCK_K))
            products = numbers * x[None, :]
            if GROUP > 0:
                # Of a word its first 16 inputs and its others stand in turns.
                of_words = tl.sum(tl.reshape(products, (BLOCK_N, BLOCKS * _WORDS, 4, 2)), 2)
                scales = tl.join(tl.broadcast_to(packed, words.shape), tl.broadcast_to(odd, words.shape))
                of_words *= tl.reshape(scale_of(scales), of_words.shape) * (1.0 / unit(tl.float32))
                sums = tl.sum(tl.sum(of_words, 2), 1)
            else:
                sums = tl.sum(products, 1)
    else:
        inputs = k + tl.arange(0, BLOCK_K)
        is_there = is_output[:, None] & (inputs < K)[None, :]
        numbers = tl.load(numbers_ptr + rows[:, None] * K + inputs[None, :], mask=is_there, other=0.0)
        x = tl.load(x_ptr + inputs, mask=inputs < K, other=0.0).to(tl.float32)
        products = numbers.to(DTYPE).to(tl.float32) * x[None, :]
        if GROUP > 0:
            GROUPS: tl.constexpr = BLOCK_K // GROUP
            group = k // GROUP + tl.arange(0, GROUPS)
            is_group = is_output[:, None] & (group * GROUP < K)[None, :]
            scales = scales_ptr + rows[:, None] * ((K + GROUP - 1) // GROUP) + group[None, :]
            of_groups = tl.sum(products.reshape(products.shape[0], GROUPS, GROUP), 2)
            sums = tl.sum(of_groups * tl.load(scales, mask=is_group, other=0.0), 1)
        else:
            sums = tl.sum(products, 1)
    return sums


@triton.jit
def _product(
    x_ptr,
    rows,
    expert,
    is_output,
    numbers_ptr,
    exponents_ptr,
    scales_ptr,
    OUTPUTS: tl.constexpr,
    K: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """f32[BLOCK_N]: x [K] times the weights of `rows`."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    sums = tl.zeros((BLOCK_N,), tl.float32)
    for k in range(0, K, BLOCK_K):
        sums += _partial(
            x_ptr, rows, expert, is_output, numbers_ptr, exponents_ptr, scales_ptr, k,
            OUTPUTS, K, FORM, GROUP, BLOCK_K, DTYPE,
        )  # fmt: skip
    if GROUP == 0:
        sums *= output_scales(scales_ptr, rows, is_output, FORM, tl.float32)
    return sums


@triton.jit
def _gate_rows(
    x_ptr,  # [rows, K]
    numbers_ptr,  # see `ExpertWeights`, as the next: of [experts, 2 N, K], gates then ups
    exponents_ptr,
    scales_ptr,
    bias_ptr,  # [experts, 2 N]
    ids_ptr,  # i32[pairs]
    weights_ptr,  # f32[pairs]
    out_ptr,  # [pairs, N]
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BIAS: tl.constexpr,
    WEIGHS: tl.constexpr,  # rows of x are multiplied by the weights
    DEPENDENT: tl.constexpr,
):
    """One program for some outputs of a pair."""
    wait(DEPENDENT)
    release(DEPENDENT)
    pair = tl.program_id(1).to(tl.int64)
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output = outputs < N
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    rows = expert * 2 * N + outputs
    x = x_ptr + pair // TOP_K * K
    gate = _product(
        x, rows, expert, is_output, numbers_ptr, exponents_ptr, scales_ptr, 2 * N, K, FORM, GROUP, BLOCK_N, BLOCK_K
    )
    up = _product(
        x, rows + N, expert, is_output, numbers_ptr, exponents_ptr, scales_ptr, 2 * N, K, FORM, GROUP, BLOCK_N, BLOCK_K
    )
    out = gated_pair(gate, up, rows, is_output, weights_ptr, bias_ptr, pair, N, ACTIVATION, BIAS, WEIGHS)
    tl.store(out_ptr + pair * N + outputs, out.to(out_ptr.dtype.element_ty), mask=is_output)


@triton.jit
def _add_rows(
    x_ptr,  # [pairs, K]
    numbers_ptr,  # see `ExpertWeights`, as the next: of [experts, N, K]
    exponents_ptr,
    scales_ptr,
    bias_ptr,  # [experts, N]
    ids_ptr,  # i32[pairs]
    weights_ptr,  # f32[pairs]
    residual_ptr,  # [rows, N]: added to, in place
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    BIAS: tl.constexpr,
    WEIGHS: tl.constexpr,  # products are multiplied by the weights
    DEPENDENT: tl.constexpr,
):
    """One program for some outputs of a row: its pairs, always in the same order."""
    wait(DEPENDENT)
    release(DEPENDENT)
    row = tl.program_id(1).to(tl.int64)
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output = outputs < N
    residuals = residual_ptr + row * N + outputs
    total = tl.load(residuals, mask=is_output, other=0.0).to(tl.float32)
    for pair in range(row * TOP_K, (row + 1) * TOP_K):
        expert = tl.load(ids_ptr + pair).to(tl.int64)
        rows = expert * N + outputs
        product = _product(
            x_ptr + pair * K, rows, expert, is_output, numbers_ptr, exponents_ptr, scales_ptr,
            N, K, FORM, GROUP, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        if BIAS:
            product += tl.load(bias_ptr + rows, mask=is_output, other=0.0).to(tl.float32)
        if WEIGHS:
            product *= tl.load(weights_ptr + pair)
        total += product
    tl.store(residuals, total.to(residual_ptr.dtype.element_ty), mask=is_output)


def gate_rows(
    x: Tensor, weight: ExpertWeights, bias: Tensor | None, routed: Routed, *, activation: str, weighs: bool = False
) -> Tensor:
    """As `gate_tiles`."""
    num_pairs, outputs = routed.ids.numel(), weight.outputs // 2
    out = torch.empty(num_pairs, outputs, dtype=x.dtype, device=x.device)
    tile, dependent = GATE_ROWS[weight.form], has_dependent_launch(x.device)
    if weight.form == FLOATS:
        gate_float_rows(x, weight.numbers, bias, routed, out, tile, activation=activation, weighs=weighs)
        return out
    _gate_rows[(triton.cdiv(outputs, tile.outputs), num_pairs)](
        x,
        *operands(weight, x, bias),
        routed.ids,
        routed.weights,
        out,
        N=outputs,
        K=weight.inputs,
        TOP_K=routed.ids.shape[1],
        BLOCK_N=tile.outputs,
        BLOCK_K=tile.inputs,
        FORM=weight.form,
        GROUP=weight.group,
        ACTIVATION=ACTIVATIONS[activation],
        BIAS=bias is not None,
        WEIGHS=weighs,
        DEPENDENT=dependent,
        **options(warps=tile.warps, dependent=dependent),
    )
    return out


def add_rows(
    x: Tensor, weight: ExpertWeights, bias: Tensor | None, routed: Routed, residual: Tensor, *, weighs: bool = True
) -> None:
    """As `add_tiles`."""
    rows, outputs = residual.shape
    tile, dependent = ADD_ROWS[weight.form], has_dependent_launch(x.device)
    if weight.form == FLOATS:
        add_float_rows(x, weight.numbers, bias, routed, residual, tile, weighs=weighs)
        return
    _add_rows[(triton.cdiv(outputs, tile.outputs), rows)](
        x,
        *operands(weight, x, bias),
        routed.ids,
        routed.weights,
        residual,
        N=outputs,
        K=weight.inputs,
        TOP_K=routed.ids.shape[1],
        BLOCK_N=tile.outputs,
        BLOCK_K=tile.inputs,
        FORM=weight.form,
        GROUP=weight.group,
        BIAS=bias is not None,
        WEIGHS=weighs,
        DEPENDENT=dependent,
        **options(warps=tile.warps, dependent=dependent),
    )
