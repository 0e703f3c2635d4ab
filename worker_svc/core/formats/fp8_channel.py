"""8-bit floats with a scale for each output, as compressed-tensors stores them (W8A8 with a scale for each token, or
weights alone).

The function is the same at every number of rows: each token is rounded by itself.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  (the name that torch's own documentation uses)
from torch import Tensor

from worker_svc.core.formats.interface import IN, ONE, OUT, Piece, Tensors
from worker_svc.core.quantization.spec import Fp8ChannelSpec

FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(FP8).max
_FIRST_WITH_FP8 = (8, 9)
_ALIGNED = 16  # inputs and outputs of the products that cards have


class Fp8Channel:
    """Implement `Packed`."""

    def __init__(self, weight: Tensor, scales: Tensor, *, rounds_inputs: bool) -> None:
        self.weight = weight  # [outputs, inputs]
        self.scales = scales  # f32[outputs, 1]
        self.rounds_inputs = rounds_inputs
        self._is_aligned = not any(size % _ALIGNED for size in weight.shape)

    @property
    def outputs(self) -> int:
        """Implement `Packed.outputs`."""
        return self.weight.shape[0]

    @property
    def inputs(self) -> int:
        """Implement `Packed.inputs`."""
        return self.weight.shape[1]

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Implement `Packed.multiply`."""
        if not self.rounds_inputs:
            return F.linear(x, (self.weight.float() * self.scales).to(x.dtype), bias)
        return self.multiply_rounded(*round_rows(x), bias, x.dtype)

    def multiply_rounded(self, rows: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """rows f8[..., inputs] times their scales f32[..., 1] @ weight.T + bias -> [..., outputs] in `dtype`."""
        if dtype is torch.bfloat16 and self._is_aligned and has_fp8(rows.device):
            return torch._scaled_mm(rows, self.weight.t(), scales, self.scales.t(), bias=bias, out_dtype=torch.bfloat16)
        product = F.linear(rows.float(), self.weight.float()) * scales * self.scales.t()
        return (product if bias is None else product + bias).to(dtype)

    def scale_outputs(self, factor: float) -> None:
        """Implement `Packed.scale_outputs`."""
        self.scales.mul_(factor)

    def reorder_outputs(self, order: Tensor) -> None:
        """Implement `Packed.reorder_outputs`."""
        rows = self.weight.view(torch.uint8)
        rows.copy_(rows[order])
        self.scales.copy_(self.scales[order])


@dataclass(frozen=True, slots=True)
class Fp8ChannelFormat:
    """Implement `Format`."""

    spec: Fp8ChannelSpec

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Implement `Format.pieces`."""
        return Piece("weight", (OUT, IN), FP8), Piece("weight_scale", (OUT, ONE), torch.float32)

    def widen(self, tensors: Tensors) -> Tensor:
        """Implement `StoredFormat.widen`."""
        return tensors["weight"].float() * tensors["weight_scale"]

    def pack(self, tensors: Tensors, inputs: int) -> Fp8Channel:  # noqa: ARG002
        """Implement `Format.pack`."""
        return Fp8Channel(tensors["weight"], tensors["weight_scale"], rounds_inputs=self.spec.rounds_inputs)


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [rows, inputs] -> the same in 8 bits, and what to multiply each row with, f32[rows, 1]."""
    largest = x.abs().amax(-1, keepdim=True).float()
    scales = (largest / _LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
    return (x.float() * (1 / scales)).clamp(-_LARGEST, _LARGEST).to(FP8), scales


def kernels_have_fp8(device: torch.device) -> bool:
    """Return whether kernels read and write 8-bit floats there; Triton's interpreter does."""
    return device.type != "cuda" or has_fp8(device)


def has_fp8(device: torch.device) -> bool:
    """Return whether it is a card that multiplies and converts 8-bit floats by itself: Ada, Hopper and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _FIRST_WITH_FP8
