"""Rotary position embedding (Su et al., 2021), with the linear and Llama 3 ways to stretch it over longer contexts."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from worker_svc.core.layers.fusion import Projected
from worker_svc.core.models.spec import RopeSpec


def inverse_frequencies(rope: RopeSpec, head_dim: int, device: torch.device) -> Tensor:
    """Radians per position of each pair of dimensions, f32[head_dim / 2].

    `llama3` divides wavelengths beyond the original context by `factor`, keeps short ones, and blends between.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device=device).float() / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.rope_type == "linear":
        return frequencies / rope.factor
    if rope.rope_type == "llama3":
        original = rope.original_max_position_embeddings
        turns = original * frequencies / (2 * math.pi)  # of a full context of the original length
        keep = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0.0, 1.0)
        return (1 - keep) * frequencies / rope.factor + keep * frequencies
    return frequencies


class RotaryEmbedding:
    """Rotates the two halves of each head against each other by the token's position.

    table  f32[max_model_len, head_dim]: cosines of each position, then sines
    """

    def __init__(self, rope: RopeSpec, head_dim: int, max_model_len: int, device: torch.device) -> None:
        if device.type == "meta":
            # Nothing is computed there, but by Python, for which torch would import its compiler.
            self.table = torch.empty(max_model_len, head_dim, device=device)
            return
        positions = torch.arange(max_model_len, dtype=torch.float32, device=device)
        angles = torch.outer(positions, inverse_frequencies(rope, head_dim, device))
        self.table = torch.cat((angles.cos(), angles.sin()), dim=-1)

    def __call__(self, queries: Projected, keys: Projected) -> tuple[Projected, Projected]:
        """Both, still to be turned: attention does that as it reads them, by `kernels/attention` or, where torch
        attends, by `rotate`.
        """
        return replace(queries, rotary=self), replace(keys, rotary=self)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine for `positions` i64[tokens], each f32[tokens, 1, head_dim / 2]."""
        cos, sin = self.table[positions].unsqueeze(1).chunk(2, dim=-1)
        return cos, sin


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [tokens, heads, head_dim] turned by the angles, computed in fp32."""
    left, right = x.float().chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)
