"""Products of a few pairs of rows and experts with weights that are floats of 16 or 8 bits, without tensor cores: at
about the speed at which the weights can be read. Sums stay within threads until the last, so that nothing stands
between reads.
"""

import triton
import triton.language as tl
from torch import Tensor

from worker_svc.core.kernels.experts.activation import ACTIVATIONS, gated_pair
from worker_svc.core.kernels.experts.routing import Routed
from worker_svc.core.kernels.experts.tuning import RowsTile
from worker_svc.core.kernels.experts.weights import FLOATS, ExpertWeights, read
from worker_svc.core.kernels.launch import has_dependent_launch, options, release, wait
from worker_svc.core.kernels.linear.one_row import VECTOR, products

_VECTOR = tl.constexpr(VECTOR)
_UNROLLED = tl.constexpr(8)  # steps of a pair


@triton.jit
def _scaled(sums, scales_ptr, rows, is_output, k, K: tl.constexpr, GROUP: tl.constexpr):
    """Sums of vectors of inputs from k on, f32[N, vectors], times their groups' scales; GROUP 0: all inputs are one."""
    if GROUP == 0:
        scales = tl.load(scales_ptr + rows, mask=is_output, other=0.0)[:, None]
    else:
        GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
        group = (k + _VECTOR * tl.arange(0, sums.shape[1])) // GROUP
        is_there = is_output[:, None] & (group < GROUPS)[None, :]
        scales = tl.load(scales_ptr + rows[:, None] * GROUPS + group[None, :], mask=is_there, other=0.0)
    return sums * scales


@triton.jit
def _gate_float_rows(
    x_ptr,  # [rows, K]
    weight_ptr,  # [experts, 2 N, K], gates then ups
    scales_ptr,  # f32[experts, 2 N, groups]
    bias_ptr,  # [experts, 2 N]
    ids_ptr,  # i32[pairs]
    weights_ptr,  # f32[pairs]
    out_ptr,  # [pairs, N]
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SCALED: tl.constexpr,
    GROUP: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BIAS: tl.constexpr,
    WEIGHS: tl.constexpr,  # rows of x are multiplied by the weights
    DEPENDENT: tl.constexpr,
):
    """One program for some outputs of a pair."""
    pair = tl.program_id(1).to(tl.int64)
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output = outputs < N
    inputs = tl.arange(0, BLOCK_K)
    EVEN: tl.constexpr = K % BLOCK_K == 0
    wait(DEPENDENT)
    release(DEPENDENT)
    rows = tl.load(ids_ptr + pair).to(tl.int64) * 2 * N + outputs
    gates = weight_ptr + rows[:, None] * K + inputs[None, :]
    xs = x_ptr + pair // TOP_K * K + inputs
    gate = tl.zeros((BLOCK_N, BLOCK_K // _VECTOR), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_K // _VECTOR), tl.float32)
    for k in tl.static_range(0, K, BLOCK_K):
        is_input = (inputs + k < K)[None, :]
        of_gates = read(gates + k, is_output[:, None], is_input, EVEN)
        of_ups = read(gates + N * K + k, is_output[:, None], is_input, EVEN)
        x = tl.load(xs + k, mask=inputs + k < K, other=0.0).to(tl.float32)
        gate_sums = products(of_gates, x, BLOCK_N, BLOCK_K, True)
        up_sums = products(of_ups, x, BLOCK_N, BLOCK_K, True)
        if SCALED:
            gate_sums = _scaled(gate_sums, scales_ptr, rows, is_output, k, K, GROUP)
            up_sums = _scaled(up_sums, scales_ptr, rows + N, is_output, k, K, GROUP)
        gate += gate_sums
        up += up_sums
    out = gated_pair(
        tl.sum(gate, 1), tl.sum(up, 1), rows, is_output, weights_ptr, bias_ptr, pair, N, ACTIVATION, BIAS, WEIGHS
    )
    tl.store(out_ptr + pair * N + outputs, out.to(out_ptr.dtype.element_ty), mask=is_output)


@triton.jit
def _add_float_rows(
    x_ptr,  # [pairs, K]
    weight_ptr,  # [experts, N, K]
    scales_ptr,  # f32[experts, N, groups]
    bias_ptr,  # [experts, N]
    ids_ptr,  # i32[pairs]
    weights_ptr,  # f32[pairs]
    residual_ptr,  # [rows, N]: added to, in place
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SCALED: tl.constexpr,
    GROUP: tl.constexpr,
    BIAS: tl.constexpr,
    WEIGHS: tl.constexpr,  # products are multiplied by the weights
    DEPENDENT: tl.constexpr,
):
    """One program for some outputs of a row: its pairs, always in the same order."""
    row = tl.program_id(1).to(tl.int64)
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output = outputs < N
    inputs = tl.arange(0, BLOCK_K)
    EVEN: tl.constexpr = K % BLOCK_K == 0
    # More at once take registers, and compilers long.
    UNROLLED: tl.constexpr = min(K, _UNROLLED * BLOCK_K)
    acc = tl.zeros((BLOCK_N, BLOCK_K // _VECTOR), tl.float32)
    biases = tl.zeros((BLOCK_N,), tl.float32)
    before = biases
    residuals = residual_ptr + row * N + outputs
    # The kernel before, which makes x, has waited for those that chose: what they wrote is read before it has ended.
    experts = ()
    for place in tl.static_range(TOP_K):
        experts += (tl.load(ids_ptr + row * TOP_K + place).to(tl.int64),)  # type: ignore[assignment]
    for place in tl.static_range(TOP_K):
        pair = row * TOP_K + place
        rows = experts[place] * N + outputs
        weight = 1.0
        if WEIGHS:
            weight = tl.load(weights_ptr + pair)
        if BIAS:
            biases += weight * tl.load(bias_ptr + rows, mask=is_output, other=0.0).to(tl.float32)
        for k in tl.static_range(0, UNROLLED, BLOCK_K):
            is_input = inputs + k < K
            numbers = read(
                weight_ptr + rows[:, None] * K + k + inputs[None, :], is_output[:, None], is_input[None, :], EVEN
            )
            if place + k == 0:
                wait(DEPENDENT)
                release(DEPENDENT)
                before = tl.load(residuals, mask=is_output, other=0.0).to(tl.float32)
            x = tl.load(x_ptr + pair * K + k + inputs, mask=is_input, other=0.0).to(tl.float32)
            sums = products(numbers, x, BLOCK_N, BLOCK_K, True)
            if SCALED:
                sums = _scaled(sums, scales_ptr, rows, is_output, k, K, GROUP)
            acc += weight * sums
        for k in range(UNROLLED, K, BLOCK_K):
            is_input = inputs + k < K
            numbers = read(
                weight_ptr + rows[:, None] * K + k + inputs[None, :], is_output[:, None], is_input[None, :], EVEN
            )
            x = tl.load(x_ptr + pair * K + k + inputs, mask=is_input, other=0.0).to(tl.float32)
            sums = products(numbers, x, BLOCK_N, BLOCK_K, True)
            if SCALED:
                sums = _scaled(sums, scales_ptr, rows, is_output, k, K, GROUP)
            acc += weight * sums
    total = before + tl.sum(acc, 1) + biases
    tl.store(residuals, total.to(residual_ptr.dtype.element_ty), mask=is_output)


def gate_float_rows(
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
    _gate_float_rows[(triton.cdiv(outputs, tile.outputs), num_pairs)](
        x,
        weight.numbers,
        x if weight.scales is None else weight.scales,
        x if bias is None else bias,
        routed.ids,
        routed.weights,
        out,
        N=outputs,
        K=weight.inputs,
        TOP_K=routed.ids.shape[1],
        BLOCK_N=tile.outputs,
        BLOCK_K=_block(weight.inputs, tile),
        SCALED=weight.form != FLOATS,
        GROUP=weight.group,
        ACTIVATION=ACTIVATIONS[activation],
        BIAS=bias is not None,
        WEIGHS=weighs,
        DEPENDENT=dependent,
        **options(warps=tile.warps, dependent=dependent),
    )


def add_float_rows(
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
    rows, outputs = residual.shape
    dependent = has_dependent_launch(x.device)
    _add_float_rows[(triton.cdiv(outputs, tile.outputs), rows)](
        x,
        weight.numbers,
        x if weight.scales is None else weight.scales,
        x if bias is None else bias,
        routed.ids,
        routed.weights,
        residual,
        N=outputs,
        K=weight.inputs,
        TOP_K=routed.ids.shape[1],
        BLOCK_N=tile.outputs,
        BLOCK_K=_block(weight.inputs, tile),
        SCALED=weight.form != FLOATS,
        GROUP=weight.group,
        BIAS=bias is not None,
        WEIGHS=weighs,
        DEPENDENT=dependent,
        **options(warps=tile.warps, dependent=dependent),
    )


def _block(inputs: int, tile: RowsTile) -> int:
    return min(tile.inputs, int(triton.next_power_of_2(inputs)))
