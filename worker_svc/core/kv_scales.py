"""Keys and values that are kept as 8-bit floats (E4M3), each layer's with a fixed scale for all of them."""

from dataclasses import dataclass

import torch
from torch import Tensor

KEPT_DTYPE = torch.float8_e4m3fn
_LARGEST = torch.finfo(KEPT_DTYPE).max


@dataclass(frozen=True, slots=True)
class KVScales:
    """By layer: a kept number times the scale is the key's or the value's."""

    keys: tuple[float, ...]
    values: tuple[float, ...]

    @classmethod
    def of_one(cls, num_layers: int) -> "KVScales":
        """Numbers are kept as they are."""
        return cls((1.0,) * num_layers, (1.0,) * num_layers)

    def of_layer(self, layer: int) -> tuple[float, float]:
        """Those of its keys and of its values."""
        return self.keys[layer], self.values[layer]


def narrow(x: Tensor, scale: float) -> Tensor:
    """x / scale as 8-bit floats, the largest of which stands for all beyond it."""
    return (x.float() / scale).clamp(-_LARGEST, _LARGEST).to(KEPT_DTYPE)


def widen(kept: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """kept * scale: what `narrow` was given, rounded."""
    return (kept.float() * scale).to(dtype)
