"""Products of rows with the weights of their experts, grouped by expert: a program has a tile of the pairs of one,
wherever their rows are. There are as many programs as the worst routing needs; those without a tile leave at once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker_svc.core.kernels.experts.activation import ACTIVATIONS, gated
from worker_svc.core.kernels.experts.routing import Routed, SortedPairs
from worker_svc.core.kernels.experts.tuning import Tile, tile_for
from worker_svc.core.kernels.experts.weights import (
    FLOATS,
    FP4,
    ExpertWeights,
    decode_fp4,
    operands,
    read,
    read_fp4,
)
from worker_svc.core.kernels.launch import has_dependent_launch, options, power_of_two_divisor, release, wait
from worker_svc.core.kernels.words import BLOCK, as_operand, in_order

_FLOATS, _FP4 = tl.constexpr(FLOATS), tl.constexpr(FP4)
_BLOCK = tl.constexpr(BLOCK)
_COLUMNS = 1024  # of a program that adds up


def most_tiles(num_pairs: int, num_experts: int, tile: Tile) -> int:
    """As many as any routing needs: each expert that has pairs may have a tile that is not full."""
    used = min(num_pairs, num_experts)
    return (num_pairs - used) // tile.pairs + used


@triton.jit
def _find_tile(order_ptr, counts_ptr, firsts_ptr, tile, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """The expert of a tile, how many pairs are left to it (none after the last tile), these, and [1, BLOCK_M] which are
    there.
    """
    PADDED: tl.constexpr = triton.next_power_of_2(EXPERTS)
    experts = tl.arange(0, PADDED)
    counts = tl.load(counts_ptr + experts, mask=experts < EXPERTS, other=0)
    tiles = (counts + BLOCK_M - 1) // BLOCK_M
    ends = tl.cumsum(tiles, 0)
    expert = tl.sum((ends <= tile).to(tl.int32), 0)
    is_own = experts == expert
    skipped = (tile - tl.sum(tl.where(is_own, ends - tiles, 0), 0)) * BLOCK_M
    first = tl.load(firsts_ptr + tl.minimum(expert, EXPERTS - 1)) + skipped
    count = tl.sum(tl.where(is_own, counts, 0), 0) - skipped
    places = tl.arange(0, BLOCK_M)
    pairs = tl.load(order_ptr + first + places, mask=places < count, other=0).to(tl.int64)
    return expert.to(tl.int64), count, pairs, (places < count)[None, :]


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
    EVEN: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Those of one step's inputs more, from k on; of FP4 a block's, in the order of `_given`."""
    if FORM == _FP4:
        words, exponents = read_fp4(numbers_ptr, exponents_ptr, rows, expert, k // _BLOCK, is_output, OUTPUTS, K)
        numbers = decode_fp4(words, exponents, x.dtype)
        sums = tl.dot(as_operand(numbers, rows.shape[0], WARPS), x, sums)
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
def _given(outputs, FORM: tl.constexpr, WARPS: tl.constexpr):
    """Outputs in the order in which products have them."""
    if FORM == _FP4:
        outputs = in_order(outputs, outputs.shape[0], WARPS)
    return outputs


@triton.jit
def _scaled(sums, rows, scales_ptr, is_output, FORM: tl.constexpr, GROUP: tl.constexpr):
    """Products by what each output has."""
    if FORM != _FLOATS and GROUP == 0:
        sums *= tl.load(scales_ptr + rows, mask=is_output, other=0.0)
    return sums


@triton.jit
def _gate_tiles(
    x_ptr,  # [rows, K]
    numbers_ptr,  # see `ExpertWeights`, as the next: of [EXPERTS, 2 N, K], gates then ups
    exponents_ptr,
    scales_ptr,
    bias_ptr,  # [EXPERTS, 2 N]
    order_ptr,
    counts_ptr,
    firsts_ptr,
    weights_ptr,  # f32[pairs]
    out_ptr,  # [pairs, N]
    N: tl.constexpr,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    WARPS: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,  # FP8: inputs that share a scale, which a step's do; 0: all
    ACTIVATION: tl.constexpr,
    BIAS: tl.constexpr,
    WEIGHS: tl.constexpr,  # rows of x are multiplied by the weights
    DEPENDENT: tl.constexpr,
):
    """The weight is the tall operand of the products, so that pairs need not be padded to its height."""
    wait(DEPENDENT)
    release(DEPENDENT)
    tile = tl.program_id(1)
    expert, count, pairs, is_pair = _find_tile(order_ptr, counts_ptr, firsts_ptr, tile, EXPERTS, BLOCK_M)
    if count > 0:
        outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        is_output = (outputs < N)[:, None]
        inputs = tl.arange(0, BLOCK_K)
        xs = x_ptr + (pairs // TOP_K)[None, :] * K + inputs[:, None]
        rows = expert * 2 * N + outputs[:, None]
        EVEN: tl.constexpr = K % BLOCK_K == 0
        gate = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            x = read(xs + k, is_pair, (inputs + k < K)[:, None], EVEN)
            gate = _add_product(
                gate, rows, expert, x, numbers_ptr, exponents_ptr, scales_ptr, k, is_output,
                2 * N, K, BLOCK_K, FORM, GROUP, EVEN, WARPS,
            )  # fmt: skip
            up = _add_product(
                up, rows + N, expert, x, numbers_ptr, exponents_ptr, scales_ptr, k, is_output,
                2 * N, K, BLOCK_K, FORM, GROUP, EVEN, WARPS,
            )  # fmt: skip
        outputs = _given(outputs, FORM, WARPS)
        is_output = (outputs < N)[:, None]
        rows = expert * 2 * N + outputs[:, None]
        gate = _scaled(gate, rows, scales_ptr, is_output, FORM, GROUP)
        up = _scaled(up, rows + N, scales_ptr, is_output, FORM, GROUP)
        if WEIGHS:
            weights = tl.load(weights_ptr + pairs)[None, :]
            gate *= weights
            up *= weights
        if BIAS:
            biases = bias_ptr + expert * 2 * N + outputs[:, None]
            gate += tl.load(biases, mask=is_output, other=0.0).to(tl.float32)
            up += tl.load(biases + N, mask=is_output, other=0.0).to(tl.float32)
        out = gated(gate, up, ACTIVATION).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + pairs[None, :] * N + outputs[:, None], out, mask=is_pair & is_output)


@triton.jit
def _multiply_tiles(
    x_ptr,  # [pairs, K]
    numbers_ptr,  # see `ExpertWeights`, as the next: of [EXPERTS, N, K]
    exponents_ptr,
    scales_ptr,
    bias_ptr,  # [EXPERTS, N]
    order_ptr,
    counts_ptr,
    firsts_ptr,
    weights_ptr,  # f32[pairs]
    out_ptr,  # [pairs, N]
    N: tl.constexpr,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    WARPS: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    BIAS: tl.constexpr,
    WEIGHS: tl.constexpr,  # products are multiplied by the weights
    DEPENDENT: tl.constexpr,
):
    """See `_gate_tiles`."""
    wait(DEPENDENT)
    release(DEPENDENT)
    tile = tl.program_id(1)
    expert, count, pairs, is_pair = _find_tile(order_ptr, counts_ptr, firsts_ptr, tile, EXPERTS, BLOCK_M)
    if count > 0:
        outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        is_output = (outputs < N)[:, None]
        inputs = tl.arange(0, BLOCK_K)
        xs = x_ptr + pairs[None, :] * K + inputs[:, None]
        rows = expert * N + outputs[:, None]
        EVEN: tl.constexpr = K % BLOCK_K == 0
        product = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            x = read(xs + k, is_pair, (inputs + k < K)[:, None], EVEN)
            product = _add_product(
                product, rows, expert, x, numbers_ptr, exponents_ptr, scales_ptr, k, is_output,
                N, K, BLOCK_K, FORM, GROUP, EVEN, WARPS,
            )  # fmt: skip
        outputs = _given(outputs, FORM, WARPS)
        is_output = (outputs < N)[:, None]
        rows = expert * N + outputs[:, None]
        product = _scaled(product, rows, scales_ptr, is_output, FORM, GROUP)
        if BIAS:
            bias = tl.load(bias_ptr + expert * N + outputs[:, None], mask=is_output, other=0.0)
            product += bias.to(tl.float32)
        if WEIGHS:
            product *= tl.load(weights_ptr + pairs)[None, :]
        out = product.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + pairs[None, :] * N + outputs[:, None], out, mask=is_pair & is_output)


@triton.jit
def _add_up(
    parts_ptr,  # [rows, TOP_K, N]
    residual_ptr,  # [rows, N]: added to, in place
    N: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Always in the same order."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < N
    residuals = residual_ptr + row * N + columns
    wait(DEPENDENT)
    release(DEPENDENT)
    total = tl.load(residuals, mask=is_column, other=0.0).to(tl.float32)
    for place in tl.static_range(TOP_K):
        parts = parts_ptr + (row * TOP_K + place) * N + columns
        total += tl.load(parts, mask=is_column, other=0.0).to(tl.float32)
    tl.store(residuals, total.to(residual_ptr.dtype.element_ty), mask=is_column)


def gate_tiles(
    x: Tensor,
    weight: ExpertWeights,
    bias: Tensor | None,
    routed: Routed,
    pairs: SortedPairs,
    *,
    activation: str,
    weighs: bool = False,
) -> Tensor:
    """activation(gate) * up of each pair: x [rows, inputs], weight [experts, 2 * outputs, inputs], gates then ups, bias
    [experts, 2 * outputs] -> [pairs, outputs]; `weighs`: inputs are multiplied by the pair's weight.
    """
    num_pairs, outputs = routed.ids.numel(), weight.outputs // 2
    out = torch.empty(num_pairs, outputs, dtype=x.dtype, device=x.device)
    tile = tile_for(num_pairs, weight.count, weight.form)
    dependent = has_dependent_launch(x.device)
    _gate_tiles[(triton.cdiv(outputs, tile.outputs), most_tiles(num_pairs, weight.count, tile))](
        x,
        *operands(weight, x, bias),
        pairs.order,
        pairs.counts,
        pairs.firsts,
        routed.weights,
        out,
        N=outputs,
        K=x.shape[1],
        EXPERTS=weight.count,
        TOP_K=routed.ids.shape[1],
        BLOCK_M=tile.pairs,
        BLOCK_N=tile.outputs,
        BLOCK_K=_step(weight, tile),
        STAGES=tile.stages,
        WARPS=tile.warps,
        FORM=weight.form,
        GROUP=weight.group,
        ACTIVATION=ACTIVATIONS[activation],
        BIAS=bias is not None,
        WEIGHS=weighs,
        DEPENDENT=dependent,
        **options(warps=tile.warps, dependent=dependent),
    )
    return out


def add_tiles(
    x: Tensor,
    weight: ExpertWeights,
    bias: Tensor | None,
    routed: Routed,
    pairs: SortedPairs,
    residual: Tensor,
    *,
    weighs: bool = True,
) -> None:
    """Add the products of each row's pairs to it, weighted if `weighs`, in place: x [pairs, inputs], weight [experts,
    outputs, inputs], bias [experts, outputs], residual [rows, outputs].
    """
    (rows, outputs), num_pairs = residual.shape, len(x)
    parts = torch.empty(num_pairs, outputs, dtype=x.dtype, device=x.device)
    tile = tile_for(num_pairs, weight.count, weight.form, is_added=True)
    dependent = has_dependent_launch(x.device)
    _multiply_tiles[(triton.cdiv(outputs, tile.outputs), most_tiles(num_pairs, weight.count, tile))](
        x,
        *operands(weight, x, bias),
        pairs.order,
        pairs.counts,
        pairs.firsts,
        routed.weights,
        parts,
        N=outputs,
        K=x.shape[1],
        EXPERTS=weight.count,
        BLOCK_M=tile.pairs,
        BLOCK_N=tile.outputs,
        BLOCK_K=_step(weight, tile),
        STAGES=tile.stages,
        WARPS=tile.warps,
        FORM=weight.form,
        GROUP=weight.group,
        BIAS=bias is not None,
        WEIGHS=weighs,
        DEPENDENT=dependent,
        **options(warps=tile.warps, dependent=dependent),
    )
    _add_up[(rows, triton.cdiv(outputs, _COLUMNS))](
        parts,
        residual,
        N=outputs,
        TOP_K=routed.ids.shape[1],
        BLOCK=_COLUMNS,
        DEPENDENT=dependent,
        **options(warps=4, dependent=dependent),
    )


def _step(weight: ExpertWeights, tile: Tile) -> int:
    """Inputs of a step: floats of 32 bits take twice the room of those that tiles are for."""
    inputs = tile.inputs * 2 // weight.numbers.element_size() if weight.form == FLOATS else tile.inputs
    return inputs if weight.group == 0 else power_of_two_divisor(weight.group, inputs)
