"""What stands between the products of an expert, and around those of a shared one."""

import triton
import triton.language as tl
from torch import Tensor

from worker_svc.core.kernels.experts.bounds import CLAMP, CLAMPED_SLOPE
from worker_svc.core.kernels.launch import has_dependent_launch, options, release, wait

_GELU_SCALE, _GELU_CUBE = tl.constexpr(1.5957691216057308), tl.constexpr(0.044715)  # 2 sqrt(2 / pi)
_CLAMP, _CLAMPED_SLOPE = tl.constexpr(CLAMP), tl.constexpr(CLAMPED_SLOPE)
_BLOCK = 1024


ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "clamped_silu": 2}  # as kernels know them


@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr):
    """activation(gate) * up in fp32; see `ACTIVATIONS`."""
    if ACTIVATION == 2:
        # What is no number stays so, as in torch: a minimum would be the bound.
        gate = tl.where(gate > _CLAMP, _CLAMP, gate)
        up = tl.where(up > _CLAMP, _CLAMP, tl.where(up < -_CLAMP, -_CLAMP, up)) + 1.0
    x = gate
    if ACTIVATION == 2:
        x = _CLAMPED_SLOPE * gate
    if ACTIVATION == 1:
        # tanh(y) is 2 sigmoid(2 y) - 1, of which no term is too large for any y.
        x = _GELU_SCALE * (gate + _GELU_CUBE * gate * gate * gate)
    return gate * tl.sigmoid(x) * up


@triton.jit
def gated_pair(
    gate,  # f32[outputs], as `up`: products of a pair
    up,
    rows,  # i64[outputs]: of the biases of all experts, those of the gates
    is_output,
    weights_ptr,
    bias_ptr,
    pair,
    N: tl.constexpr,  # ups stand so much further than gates
    ACTIVATION: tl.constexpr,
    BIAS: tl.constexpr,
    WEIGHS: tl.constexpr,  # what was multiplied, by the pair's weight
):
    """activation(gate) * up of a pair's products, weighted and with their biases."""
    if WEIGHS:
        weight = tl.load(weights_ptr + pair)
        gate *= weight
        up *= weight
    if BIAS:
        gate += tl.load(bias_ptr + rows, mask=is_output, other=0.0).to(tl.float32)
        up += tl.load(bias_ptr + rows + N, mask=is_output, other=0.0).to(tl.float32)
    return gated(gate, up, ACTIVATION)


@triton.jit
def _scale_by_sigmoid(
    gated_ptr,  # [rows, SIZE]
    x_ptr,  # [rows, K]
    gate_ptr,  # [K]
    SIZE: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BLOCK)
    wait(DEPENDENT)
    release(DEPENDENT)
    acc = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, K, BLOCK):
        is_input = start + places < K
        x = tl.load(x_ptr + row * K + start + places, mask=is_input, other=0.0).to(tl.float32)
        acc += x * tl.load(gate_ptr + start + places, mask=is_input, other=0.0).to(tl.float32)
    scale = tl.sigmoid(tl.sum(acc, 0))
    for start in range(0, SIZE, BLOCK):
        values = gated_ptr + row * SIZE + start + places
        is_value = start + places < SIZE
        value = tl.load(values, mask=is_value, other=0.0).to(tl.float32) * scale
        tl.store(values, value.to(gated_ptr.dtype.element_ty), mask=is_value)


def scale_by_sigmoid(values: Tensor, x: Tensor, gate: Tensor) -> None:
    """Multiply values [rows, size] by sigmoid(x @ gate), in place: x [rows, inputs], gate [inputs]."""
    dependent = has_dependent_launch(x.device)
    _scale_by_sigmoid[(len(values),)](
        values,
        x,
        gate,
        SIZE=values.shape[1],
        K=x.shape[1],
        BLOCK=_BLOCK,
        DEPENDENT=dependent,
        **options(warps=4, dependent=dependent),
    )
