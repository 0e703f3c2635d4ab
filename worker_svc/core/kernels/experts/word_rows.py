"""Products of a few pairs of rows and experts with weights of 4 bits, without tensor cores: at about the speed at which
the weights can be read. Sums stay within threads until the last, as in `float_rows`.
"""

import triton
import triton.language as tl
from torch import Tensor

from worker_svc.core.kernels.experts.activation import ACTIVATIONS, gated_pair
from worker_svc.core.kernels.experts.routing import Routed
from worker_svc.core.kernels.experts.tuning import RowsTile
from worker_svc.core.kernels.experts.weights import (
    FP4,
    INT4,
    ExpertWeights,
    fp4_pairs,
    operands,
    output_scales,
    read_fp4,
    read_int4,
)
from worker_svc.core.kernels.launch import has_dependent_launch, options, release, wait
from worker_svc.core.kernels.linear.int4_numbers import int4_pairs, scale_of, unit
from worker_svc.core.kernels.words import BLOCK, WORDS, lower, upper

_FP4, _INT4 = tl.constexpr(FP4), tl.constexpr(INT4)
_BLOCK, _WORDS = tl.constexpr(BLOCK), tl.constexpr(WORDS)
_UNROLLED = tl.constexpr(8)  # steps: more take registers, and compilers long


@triton.jit
def _read(
    numbers_ptr,
    exponents_ptr,
    scales_ptr,
    outputs,  # [N]
    experts,  # i64[S], as `blocks`: of each block
    blocks,
    is_output,
    is_block,
    OUTPUTS: tl.constexpr,
    K: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Words i32[N * S, 16] of blocks of inputs of some outputs, what they are decoded with, and their outputs' scales
    [N * S, 1], where all inputs share these.
    """
    SHAPE: tl.constexpr = (outputs.shape[0], blocks.shape[0])
    ALL: tl.constexpr = (outputs.shape[0] * blocks.shape[0], 1)
    rows = tl.reshape(experts[None, :] * OUTPUTS + outputs[:, None], ALL)
    is_there = tl.reshape(is_output[:, None] & is_block[None, :], ALL)
    of_experts = tl.reshape(tl.broadcast_to(experts[None, :], SHAPE), ALL)
    of_blocks = tl.reshape(tl.broadcast_to(blocks[None, :], SHAPE), ALL)
    if FORM == _FP4:
        words, first = read_fp4(numbers_ptr, exponents_ptr, rows, of_experts, of_blocks, is_there, OUTPUTS, K)
        second = first
    else:
        words, first, second = read_int4(
            numbers_ptr, scales_ptr, rows, of_experts, of_blocks, is_there, OUTPUTS, K, GROUP
        )
    scales = 1.0
    if GROUP == 0:
        scales = output_scales(scales_ptr, rows, is_there, FORM, tl.float32)
    return words, first, second, scales


@triton.jit
def _inputs(x_ptr, starts, blocks, is_block, K: tl.constexpr):
    """Inputs of blocks, as each word has them: eight of f32[S, 16], by sixteen, half of it and place in a pair."""
    places = blocks[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    x = tl.load(x_ptr + starts[:, None] + places, mask=is_block[:, None] & (places < K), other=0.0)
    # Of an input v and t are its word, h and e its pair in it, and s its place in that:
    # v, e, h, t, s -> t, v, s, h, e.
    x = tl.permute(tl.reshape(x, (blocks.shape[0], 4, 2, 2, 4, 2)), (0, 4, 1, 5, 3, 2))
    x = tl.reshape(x, (blocks.shape[0], _WORDS, 2, 2, 2)).to(tl.float32)
    even, odd = tl.split(x)
    even_low, even_high = tl.split(even)
    odd_low, odd_high = tl.split(odd)
    return tl.split(even_low) + tl.split(even_high) + tl.split(odd_low) + tl.split(odd_high)


@triton.jit
def _add_pair(sums, pairs, first, second, SHAPE: tl.constexpr):
    """sums + pairs, two bf16 in each i32[N * S, 16], times f32[S, 16] each."""
    sums += lower(pairs) * tl.reshape(tl.broadcast_to(first[None, :, :], SHAPE), sums.shape)
    return sums + upper(pairs) * tl.reshape(tl.broadcast_to(second[None, :, :], SHAPE), sums.shape)


@triton.jit
def _of_words(x, words, first, second, scales, FORM: tl.constexpr, GROUP: tl.constexpr):
    """f32[N * S, 16]: the sum over the inputs of each word, as `_read` and `_inputs` give them."""
    S: tl.constexpr = x[0].shape[0]
    SHAPE: tl.constexpr = (words.shape[0] // S, S, _WORDS)
    if FORM == _FP4:  # noqa: SIM108  (the compiler makes both branches of an expression)
        pairs = fp4_pairs(words, first)
    else:
        pairs = int4_pairs(words, first, second)
    sums = tl.zeros(words.shape, tl.float32)
    sums = _add_pair(sums, pairs[0], x[0], x[1], SHAPE)
    sums = _add_pair(sums, pairs[1], x[2], x[3], SHAPE)
    if FORM == _INT4 and GROUP == 16:
        others = tl.zeros(words.shape, tl.float32)
        others = _add_pair(others, pairs[2], x[4], x[5], SHAPE)
        others = _add_pair(others, pairs[3], x[6], x[7], SHAPE)
        sums = sums * scale_of(first) + others * scale_of(second)
        scales *= 1.0 / unit(tl.float32)
    else:
        sums = _add_pair(sums, pairs[2], x[4], x[5], SHAPE)
        sums = _add_pair(sums, pairs[3], x[6], x[7], SHAPE)
        if FORM == _INT4 and GROUP > 0:
            scales *= scale_of(first) * (1.0 / unit(tl.float32))
    return sums * scales


@triton.jit
def _add_gates(
    gate,
    up,
    x_ptr,  # of the row
    numbers_ptr,
    exponents_ptr,
    scales_ptr,
    outputs,
    expert,
    is_output,
    step,
    N: tl.constexpr,
    K: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCKS: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
):
    """The sums of gates and of ups, and those of a step's blocks."""
    blocks = step * BLOCKS + tl.arange(0, BLOCKS)
    is_block = blocks < COUNT
    experts = expert + tl.zeros_like(blocks)
    words, first, second, scales = _read(
        *(numbers_ptr, exponents_ptr, scales_ptr, outputs, experts, blocks, is_output, is_block),
        *(2 * N, K, FORM, GROUP),
    )
    up_words, up_first, up_second, up_scales = _read(
        *(numbers_ptr, exponents_ptr, scales_ptr, outputs + N, experts, blocks, is_output, is_block),
        *(2 * N, K, FORM, GROUP),
    )
    x = _inputs(x_ptr, tl.zeros_like(experts), blocks, is_block, K)
    gate += _of_words(x, words, first, second, scales, FORM, GROUP)
    up += _of_words(x, up_words, up_first, up_second, up_scales, FORM, GROUP)
    return gate, up


@triton.jit
def _blocks_of_row(
    row,
    step,
    ids_ptr,
    weights_ptr,
    TOP_K: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCKS: tl.constexpr,
    WEIGHS: tl.constexpr,
):
    """A step's blocks of all pairs of a row: pairs, numbers of blocks, which are there, experts and weights."""
    places = step * BLOCKS + tl.arange(0, BLOCKS)
    is_block = places < TOP_K * COUNT
    pairs = row * TOP_K + places // COUNT
    experts = tl.load(ids_ptr + pairs, mask=is_block, other=0).to(tl.int64)
    weights = tl.full((BLOCKS,), 1.0, tl.float32)
    if WEIGHS:
        weights = tl.load(weights_ptr + pairs, mask=is_block, other=0.0)
    return pairs, places % COUNT, is_block, experts, weights


@triton.jit
def _of_rows(weights, BLOCK_N: tl.constexpr):
    """f32[S] -> [N * S, 1]."""
    S: tl.constexpr = weights.shape[0]
    return tl.reshape(tl.broadcast_to(weights[None, :], (BLOCK_N, S)), (BLOCK_N * S, 1))


@triton.jit
def _gate_word_rows(
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
    BLOCKS: tl.constexpr,  # of 128 inputs, at a time
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BIAS: tl.constexpr,
    WEIGHS: tl.constexpr,  # rows of x are multiplied by the weights
    DEPENDENT: tl.constexpr,
):
    """One program for some outputs of a pair."""
    COUNT: tl.constexpr = (K + _BLOCK - 1) // _BLOCK
    pair = tl.program_id(1).to(tl.int64)
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output = outputs < N
    gate = tl.zeros((BLOCK_N * BLOCKS, _WORDS), tl.float32)
    up = tl.zeros((BLOCK_N * BLOCKS, _WORDS), tl.float32)
    wait(DEPENDENT)
    release(DEPENDENT)
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    x = x_ptr + pair // TOP_K * K
    STEPS: tl.constexpr = (COUNT + BLOCKS - 1) // BLOCKS
    for step in tl.static_range(min(STEPS, _UNROLLED)):
        gate, up = _add_gates(
            *(gate, up, x, numbers_ptr, exponents_ptr, scales_ptr, outputs, expert, is_output, step),
            *(N, K, COUNT, BLOCKS, FORM, GROUP),
        )
    for step in range(_UNROLLED, STEPS):
        gate, up = _add_gates(
            *(gate, up, x, numbers_ptr, exponents_ptr, scales_ptr, outputs, expert, is_output, step),
            *(N, K, COUNT, BLOCKS, FORM, GROUP),
        )
    gates = tl.sum(tl.reshape(gate, (BLOCK_N, BLOCKS * _WORDS)), 1)
    ups = tl.sum(tl.reshape(up, (BLOCK_N, BLOCKS * _WORDS)), 1)
    rows = expert * 2 * N + outputs
    out = gated_pair(gates, ups, rows, is_output, weights_ptr, bias_ptr, pair, N, ACTIVATION, BIAS, WEIGHS)
    tl.store(out_ptr + pair * N + outputs, out.to(out_ptr.dtype.element_ty), mask=is_output)


@triton.jit
def _add_word_rows(
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
    BLOCKS: tl.constexpr,  # of 128 inputs of any pairs, at a time
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    BIAS: tl.constexpr,
    WEIGHS: tl.constexpr,  # products are multiplied by the weights
    DEPENDENT: tl.constexpr,
):
    """One program for some outputs of a row: the blocks of its pairs, always in the same order."""
    COUNT: tl.constexpr = (K + _BLOCK - 1) // _BLOCK
    row = tl.program_id(1).to(tl.int64)
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output = outputs < N
    acc = tl.zeros((BLOCK_N * BLOCKS, _WORDS), tl.float32)
    before = tl.zeros((BLOCK_N,), tl.float32)
    biases = before
    residuals = residual_ptr + row * N + outputs
    # The kernel before, which makes x, has waited for those that chose: what they wrote is read before it has ended.
    STEPS: tl.constexpr = (TOP_K * COUNT + BLOCKS - 1) // BLOCKS
    for step in tl.static_range(min(STEPS, _UNROLLED)):
        pairs, blocks, is_block, experts, weights = _blocks_of_row(
            row, step, ids_ptr, weights_ptr, TOP_K, COUNT, BLOCKS, WEIGHS
        )
        words, first, second, scales = _read(
            numbers_ptr, exponents_ptr, scales_ptr, outputs, experts, blocks, is_output, is_block, N, K, FORM, GROUP
        )
        if step == 0:
            wait(DEPENDENT)
            release(DEPENDENT)
            before = tl.load(residuals, mask=is_output, other=0.0).to(tl.float32)
        x = _inputs(x_ptr, pairs * K, blocks, is_block, K)
        acc += _of_words(x, words, first, second, scales * _of_rows(weights, BLOCK_N), FORM, GROUP)
    for step in range(_UNROLLED, STEPS):
        pairs, blocks, is_block, experts, weights = _blocks_of_row(
            row, step, ids_ptr, weights_ptr, TOP_K, COUNT, BLOCKS, WEIGHS
        )
        words, first, second, scales = _read(
            numbers_ptr, exponents_ptr, scales_ptr, outputs, experts, blocks, is_output, is_block, N, K, FORM, GROUP
        )
        x = _inputs(x_ptr, pairs * K, blocks, is_block, K)
        acc += _of_words(x, words, first, second, scales * _of_rows(weights, BLOCK_N), FORM, GROUP)
    if BIAS:
        for place in tl.static_range(TOP_K):
            pair = row * TOP_K + place
            rows = tl.load(ids_ptr + pair).to(tl.int64) * N + outputs
            bias = tl.load(bias_ptr + rows, mask=is_output, other=0.0).to(tl.float32)
            if WEIGHS:
                bias *= tl.load(weights_ptr + pair)
            biases += bias
    total = before + tl.sum(tl.reshape(acc, (BLOCK_N, BLOCKS * _WORDS)), 1) + biases
    tl.store(residuals, total.to(residual_ptr.dtype.element_ty), mask=is_output)


def gate_word_rows(
    x: Tensor,
    weight: ExpertWeights,
    bias: Tensor | None,
    routed: Routed,
    out: Tensor,
    tile: RowsTile,
    *,
    activation: str,
    weighs: bool,
) -> None:
    """As `gate_tiles`, into `out` [pairs, outputs]."""
    num_pairs, outputs = out.shape
    dependent = has_dependent_launch(x.device)
    _gate_word_rows[(triton.cdiv(outputs, tile.outputs), num_pairs)](
        x,
        *operands(weight, x, bias),
        routed.ids,
        routed.weights,
        out,
        N=outputs,
        K=weight.inputs,
        TOP_K=routed.ids.shape[1],
        BLOCK_N=tile.outputs,
        BLOCKS=_blocks(triton.cdiv(weight.inputs, BLOCK), tile),
        FORM=weight.form,
        GROUP=weight.group,
        ACTIVATION=ACTIVATIONS[activation],
        BIAS=bias is not None,
        WEIGHS=weighs,
        DEPENDENT=dependent,
        **options(warps=tile.warps, dependent=dependent),
    )


def add_word_rows(
    x: Tensor,
    weight: ExpertWeights,
    bias: Tensor | None,
    routed: Routed,
    residual: Tensor,
    tile: RowsTile,
    *,
    weighs: bool,
) -> None:
    """As `add_tiles`; routed: by kernels before the last."""
    (rows, outputs), top_k = residual.shape, routed.ids.shape[1]
    dependent = has_dependent_launch(x.device)
    _add_word_rows[(triton.cdiv(outputs, tile.outputs), rows)](
        x,
        *operands(weight, x, bias),
        routed.ids,
        routed.weights,
        residual,
        N=outputs,
        K=weight.inputs,
        TOP_K=top_k,
        BLOCK_N=tile.outputs,
        BLOCKS=_blocks(top_k * triton.cdiv(weight.inputs, BLOCK), tile),
        FORM=weight.form,
        GROUP=weight.group,
        BIAS=bias is not None,
        WEIGHS=weighs,
        DEPENDENT=dependent,
        **options(warps=tile.warps, dependent=dependent),
    )


def _blocks(count: int, tile: RowsTile) -> int:
    return min(tile.inputs // BLOCK, int(triton.next_power_of_2(count)))
