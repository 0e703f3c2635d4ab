"""The weights of a layer with the delta rule, and its heads."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class DeltaWeights:
    """The weights of a layer with the delta rule, beside its products."""

    conv: Tensor  # [channels, conv_width], of the oldest token first
    decay_rate: Tensor  # f32[value_heads]: what softplus(decay + bias) is multiplied with, below zero
    decay_bias: Tensor  # f32[value_heads]


class DeltaHeads(Protocol):
    """This rank's heads; see `StateShape`."""

    @property
    def num_key_heads(self) -> int:
        """Of queries, too."""

    @property
    def num_value_heads(self) -> int:
        """A multiple of the key heads."""

    @property
    def key_dim(self) -> int:
        """Of a head."""

    @property
    def value_dim(self) -> int:
        """Of a head."""

    @property
    def conv_width(self) -> int:
        """Tokens that a channel sees."""
