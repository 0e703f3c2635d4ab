"""Floats of 4 bits: a sign, two bits of exponent, one of mantissa (E2M1; OCP Microscaling, 2023), two in a byte."""

import torch
from torch import Tensor

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def read_e2m1(packed: Tensor) -> Tensor:
    """packed u8[..., bytes] -> f32[..., 2 * bytes]; the lower four bits come first."""
    return e2m1_values(torch.stack((packed & 15, packed >> 4), -1).flatten(-2))


def e2m1_values(numbers: Tensor) -> Tensor:
    """numbers [...], integers from 0 to 15 -> the floats with these bits, f32[...]."""
    values = torch.tensor([*_MAGNITUDES, *(-each for each in _MAGNITUDES)], device=numbers.device)
    return values[numbers.long()]
