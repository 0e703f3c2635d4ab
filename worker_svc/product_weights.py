"""Random weights and rows of products, and what is right of them, for the tuner."""

from typing import TypeAlias

import torch
from torch import Tensor

from worker_svc.core.formats.dense import Dense
from worker_svc.core.formats.fp8_channel import Fp8Channel, round_rows
from worker_svc.core.formats.fp8_groups import Fp8Groups
from worker_svc.core.formats.int4 import INT4_BITS, Int4, Int4Format, even_scales
from worker_svc.core.formats.words import WORD
from worker_svc.core.kernels.linear.product import FP8_FORMS, FP8_GROUPS, FP8_W8A8, INT4, NARROW, Product
from worker_svc.core.kernels.linear.unscaled import Unscaled

Weight: TypeAlias = Dense | Fp8Channel | Fp8Groups | Int4
_BYTE = 8


class Drawing:
    """Draws on a device.

    Args:
        dtype: of rows, where weights are narrower than these.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype

    def rows(self, product: Product, rows: int, columns: int, seed: int) -> Tensor:
        """Of standard normal numbers, in the dtype of the product's rows: [rows, columns]."""
        return self._normal(rows, columns, seed).to(self._dtype_of(product))

    def weight(self, product: Product, seed: int) -> Weight:
        """Of numbers with which outputs are about as large as inputs."""
        if product.dtype == INT4:
            return self._int4(product, seed)
        floats = self._normal(product.outputs, product.inputs, seed) * product.inputs**-0.5
        if product.dtype == FP8_GROUPS:
            return _fp8_groups(floats, product.group or product.inputs)
        if product.dtype in FP8_FORMS:
            return Fp8Channel(*round_rows(floats), rounds_inputs=product.dtype == FP8_W8A8)
        return Dense(floats.to(self._dtype_of(product)))

    def _int4(self, product: Product, seed: int) -> Int4:
        generator = torch.Generator(self._device).manual_seed(seed)
        form = Int4Format(product.group)
        tensors = {
            piece.suffix: torch.empty(
                piece.shape(product.outputs, product.inputs), dtype=piece.dtype, device=self._device
            )
            for piece in form.pieces
        }
        for tensor in tensors.values():
            if tensor.dtype == WORD:
                tensor.random_(-(1 << 31), (1 << 31) - 1, generator=generator)
            else:
                tensor.copy_(even_scales(tensor, product.inputs**-0.5))
        return form.pack(tensors, product.inputs)

    def _normal(self, rows: int, columns: int, seed: int) -> Tensor:
        generator = torch.Generator(self._device).manual_seed(seed)
        return torch.randn(rows, columns, generator=generator, device=self._device, dtype=torch.float32)

    def _dtype_of(self, product: Product) -> torch.dtype:
        dtype: torch.dtype = self._dtype if product.dtype in NARROW else getattr(torch, product.dtype)
        return dtype


def _fp8_groups(weight: Tensor, group: int) -> Fp8Groups:
    """f32[outputs, inputs], of groups of which the last may have fewer inputs, rounded."""
    rounded = [round_rows(weight[:, first : first + group]) for first in range(0, weight.shape[1], group)]
    numbers, scales = (torch.cat(parts, 1) for parts in zip(*rounded, strict=True))
    return Fp8Groups(numbers, scales.t().contiguous(), group)


def weight_bytes(product: Product) -> int:
    """The bytes that its weight takes, but for scales."""
    numbers = product.outputs * product.inputs
    if product.dtype == INT4:
        return numbers * INT4_BITS // _BYTE
    itemsize = 1 if product.dtype in FP8_FORMS else getattr(torch, product.dtype).itemsize
    return numbers * int(itemsize)


def right_product(x: Tensor, weight: Weight, eps: float | None) -> Tensor:
    """x [rows, inputs] @ weight.T in fp32 by torch -> f32[rows, outputs]; before it the RMS norm of this eps, without a
    weight, if any, and the rounding of rows that the weight's form has.
    """
    scales = 1.0 if eps is None else Unscaled(x, eps).scales()
    if isinstance(weight, Fp8Channel):
        rows = x.float() * scales
        if weight.rounds_inputs:
            rounded, row_scales = round_rows(rows.to(x.dtype))
            rows = rounded.float() * row_scales
        return rows @ (weight.weight.float() * weight.scales).t()
    floats = weight.weight if isinstance(weight, Dense) else weight.widen(torch.float32)
    return x.float() @ floats.float().t() * scales
