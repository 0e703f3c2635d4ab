"""Rotary position embedding (Su et al., 2021), with the known ways to stretch it over longer contexts."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from worker_svc.core.layers.fusion import Projected
from worker_svc.core.models.spec import RopeSpec

_Stretch = Callable[[RopeSpec, Tensor, int], Tensor]


def inverse_frequencies(rope: RopeSpec | None, head_dim: int, max_model_len: int, device: torch.device) -> Tensor:
    """Radians per position of each pair of dimensions, f32[head_dim / 2]; zeros where nothing turns.

    max_model_len: tokens of a context; some kinds stretch more for longer ones.
    """
    turning = torch.zeros(head_dim // 2, device=device)
    if rope is not None:
        dims = rope.dims or head_dim
        turning[: dims // 2] = _STRETCHES[rope.rope_type](rope, _plain(rope.theta, dims, device), max_model_len)
    return turning


def _plain(theta: float, dims: int, device: torch.device) -> Tensor:
    return 1.0 / theta ** _exponents(dims, device)


def _exponents(dims: int, device: torch.device) -> Tensor:
    return torch.arange(0, dims, 2, dtype=torch.int64, device=device).float() / dims


def _default(_rope: RopeSpec, frequencies: Tensor, _max_model_len: int) -> Tensor:
    return frequencies


def _linear(rope: RopeSpec, frequencies: Tensor, _max_model_len: int) -> Tensor:
    return frequencies / rope.factor


def _proportional(rope: RopeSpec, frequencies: Tensor, _max_model_len: int) -> Tensor:
    """Those of a whole head, of which the fastest `turning_pairs` turn; the rest stand."""
    slow = torch.arange(len(frequencies), device=frequencies.device) >= rope.turning_pairs
    return (frequencies / rope.factor).masked_fill(slow, 0.0)


def _dynamic(rope: RopeSpec, frequencies: Tensor, max_model_len: int) -> Tensor:
    """The base grows with the context, of which the longest counts: what is in the cache was turned by it, too."""
    original = rope.original_max_position_embeddings
    if max_model_len <= original:
        return frequencies
    dims = 2 * len(frequencies)
    growth = (rope.factor * max_model_len / original - (rope.factor - 1)) ** (dims / (dims - 2))
    return _plain(rope.theta * growth, dims, frequencies.device)


def _llama3(rope: RopeSpec, frequencies: Tensor, _max_model_len: int) -> Tensor:
    """Wavelengths beyond the original context are divided by `factor`, short ones are kept, others are between; of
    Llama 4 Scout none are.
    """
    turns = rope.original_max_position_embeddings * frequencies / (2 * math.pi)  # of a context of the original length
    between = (rope.high_freq_factor - rope.low_freq_factor) or 1e-9
    keep = ((turns - rope.low_freq_factor) / between).clamp(0.0, 1.0)
    return (1 - keep) * frequencies / rope.factor + keep * frequencies


def _yarn(rope: RopeSpec, frequencies: Tensor, _max_model_len: int) -> Tensor:
    """Dimensions that turn fast are kept, slow ones divided by `factor`, others between (Peng et al., 2023)."""
    dims = 2 * len(frequencies)

    def dimension(turns: float) -> float:
        """The pair that turns so often in the original context."""
        wavelength = rope.original_max_position_embeddings / (turns * 2 * math.pi)
        return dims * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncates:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    steps = torch.arange(len(frequencies), dtype=torch.float32, device=frequencies.device)
    slow = ((steps - low) / ((high - low) or 0.001)).clamp(0.0, 1.0)
    return slow * frequencies / rope.factor + (1 - slow) * frequencies


def _longrope(rope: RopeSpec, frequencies: Tensor, max_model_len: int) -> Tensor:
    """A factor for each pair of dimensions; others for contexts beyond the original length (Ding et al., 2024)."""
    is_long = max_model_len > rope.original_max_position_embeddings
    return frequencies / torch.tensor(rope.long_factors if is_long else rope.short_factors, device=frequencies.device)


_STRETCHES: Mapping[str, _Stretch] = {
    "default": _default,
    "linear": _linear,
    "proportional": _proportional,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}


def order_of_dims(rope: RopeSpec | None, head_dim: int) -> list[int] | None:
    """The order in which the dimensions of a head are to stand so that halves turn against each other; None: theirs.

    Queries and keys that are ordered alike have the same products.
    """
    if rope is None or (rope.dims is None and not rope.is_paired):
        return None
    dims = rope.dims or head_dim
    pairs = dims // 2
    lefts = range(0, dims, 2) if rope.is_paired else range(pairs)
    rights = range(1, dims, 2) if rope.is_paired else range(pairs, dims)
    middle = (dims + head_dim) // 2
    return [*lefts, *range(dims, middle), *rights, *range(middle, head_dim)]


class RotaryEmbedding:
    """Rotates the two halves of each head against each other by the token's position.

    table  f32[max_model_len, head_dim]: cosines of each position, then sines
    """

    def __init__(self, rope: RopeSpec | None, head_dim: int, max_model_len: int, device: torch.device) -> None:
        if device.type == "meta":
            # Nothing is computed there, but by Python, for which torch would import its compiler.
            self.table = torch.empty(max_model_len, head_dim, device=device)
            return
        positions = torch.arange(max_model_len, dtype=torch.float32, device=device)
        angles = torch.outer(positions, inverse_frequencies(rope, head_dim, max_model_len, device))
        self.table = torch.cat((angles.cos(), angles.sin()), dim=-1)
        if rope is not None and rope.attention_factor != 1.0:
            turning = torch.arange(head_dim, device=device) % (head_dim // 2) < (rope.dims or head_dim) // 2
            self.table[:, turning] *= rope.attention_factor

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
