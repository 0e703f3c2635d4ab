"""Products of a few rows with the weights of their experts: a program has some outputs of one row, or of one of its
experts. Programs of the same outputs run side by side, so that what several rows read of one expert is read once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker_svc.core.kernels.experts.activation import gated
from worker_svc.core.kernels.experts.routing import Routed
from worker_svc.core.kernels.launch import has_dependent_launch, options, release, wait

MOST_FEW_ROWS = 16
_OUTPUTS, _INPUTS = 8, 512  # of a program, and of a step of its loop


@triton.jit
def _weight_tile(weights, is_output, inputs, k, K: tl.constexpr):
    return tl.load(weights + k, mask=is_output[:, None] & (inputs + k < K)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _gate_pairs(
    x_ptr,  # [rows, K]
    weight_ptr,  # [experts, 2 N, K], gates then ups
    bias_ptr,  # [experts, 2 N]
    ids_ptr,  # i32[pairs]
    out_ptr,  # [pairs, N]
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GELU: tl.constexpr,
    BIAS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    pair = tl.program_id(0)
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output = outputs < N
    inputs = tl.arange(0, BLOCK_K)
    wait(DEPENDENT)
    release(DEPENDENT)
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    gates = weight_ptr + expert * 2 * N * K + outputs[:, None] * K + inputs[None, :]
    xs = x_ptr + (pair // TOP_K).to(tl.int64) * K + inputs
    gate_parts = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    up_parts = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for k in range(0, K, BLOCK_K):
        x = tl.load(xs + k, mask=inputs + k < K, other=0.0).to(tl.float32)[None, :]
        gate_parts += _weight_tile(gates, is_output, inputs, k, K) * x
        up_parts += _weight_tile(gates + N * K, is_output, inputs, k, K) * x
    gate, up = tl.sum(gate_parts, 1), tl.sum(up_parts, 1)
    if BIAS:
        gate += tl.load(bias_ptr + expert * 2 * N + outputs, mask=is_output, other=0.0).to(tl.float32)
        up += tl.load(bias_ptr + expert * 2 * N + N + outputs, mask=is_output, other=0.0).to(tl.float32)
    out = gated(gate, up, GELU).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + pair.to(tl.int64) * N + outputs, out, mask=is_output)


@triton.jit
def _add_pairs(
    x_ptr,  # [pairs, K]
    weight_ptr,  # [experts, N, K]
    bias_ptr,  # [experts, N]
    ids_ptr,  # i32[pairs]
    weights_ptr,  # f32[pairs]
    residual_ptr,  # [rows, N]: added to, in place
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    row = tl.program_id(0)
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output = outputs < N
    inputs = tl.arange(0, BLOCK_K)
    residuals = residual_ptr + row.to(tl.int64) * N + outputs
    wait(DEPENDENT)
    release(DEPENDENT)
    total = tl.load(residuals, mask=is_output, other=0.0).to(tl.float32)
    for place in range(TOP_K):
        pair = row * TOP_K + place
        expert = tl.load(ids_ptr + pair).to(tl.int64)
        weights = weight_ptr + expert * N * K + outputs[:, None] * K + inputs[None, :]
        parts = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        for k in range(0, K, BLOCK_K):
            x = tl.load(x_ptr + pair.to(tl.int64) * K + k + inputs, mask=inputs + k < K, other=0.0).to(tl.float32)
            parts += _weight_tile(weights, is_output, inputs, k, K) * x[None, :]
        product = tl.sum(parts, 1)
        if BIAS:
            product += tl.load(bias_ptr + expert * N + outputs, mask=is_output, other=0.0).to(tl.float32)
        total += tl.load(weights_ptr + pair) * product
    tl.store(residuals, total.to(residual_ptr.dtype.element_ty), mask=is_output)


def gate_pairs(x: Tensor, weight: Tensor, bias: Tensor | None, routed: Routed, *, is_gelu: bool) -> Tensor:
    """activation(gate) * up of each pair: x [rows, inputs], weight [experts, 2 * outputs, inputs], gates then ups, bias
    [experts, 2 * outputs] -> [pairs, outputs].
    """
    pairs, outputs = routed.ids.numel(), weight.shape[1] // 2
    out = torch.empty(pairs, outputs, dtype=x.dtype, device=x.device)
    dependent = has_dependent_launch(x.device)
    _gate_pairs[(pairs, triton.cdiv(outputs, _OUTPUTS))](
        x,
        weight,
        weight if bias is None else bias,
        routed.ids,
        out,
        N=outputs,
        K=x.shape[1],
        TOP_K=routed.ids.shape[1],
        BLOCK_N=_OUTPUTS,
        BLOCK_K=_INPUTS,
        GELU=is_gelu,
        BIAS=bias is not None,
        DEPENDENT=dependent,
        **options(warps=4, dependent=dependent),
    )
    return out


def add_pairs(x: Tensor, weight: Tensor, bias: Tensor | None, routed: Routed, residual: Tensor) -> None:
    """Add the weighted products of each row's pairs to it, in place: x [pairs, inputs], weight [experts, outputs,
    inputs], bias [experts, outputs], residual [rows, outputs].
    """
    rows, outputs = residual.shape
    dependent = has_dependent_launch(x.device)
    _add_pairs[(rows, triton.cdiv(outputs, _OUTPUTS))](
        x,
        weight,
        weight if bias is None else bias,
        routed.ids,
        routed.weights,
        residual,
        N=outputs,
        K=x.shape[1],
        TOP_K=routed.ids.shape[1],
        BLOCK_N=_OUTPUTS,
        BLOCK_K=min(_INPUTS, triton.next_power_of_2(x.shape[1])),
        BIAS=bias is not None,
        DEPENDENT=dependent,
        **options(warps=4, dependent=dependent),
    )
