"""The states of all slots: what layers with the delta rule keep of a sequence instead of keys and values.

A state belongs to a slot and stands for the first tokens of its sequence, all that are computed. It is never cleared:
what computes a sequence's first token takes zeros for it. Some are saved, with which other sequences begin.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class StateShape:
    """The state of a sequence on one rank; layers are alike."""

    num_layers: int
    num_key_heads: int
    num_value_heads: int
    key_dim: int  # of a head, as the next
    value_dim: int
    conv_width: int
    dtype: torch.dtype  # of what a convolution has seen; matrices are f32

    @property
    def num_channels(self) -> int:
        """Of the convolution: queries, keys and values."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    @property
    def seen(self) -> tuple[int, ...]:
        """Of a layer: what the convolution has seen of the last `conv_width` tokens, position p at p % conv_width."""
        return self.conv_width, self.num_channels

    @property
    def matrices(self) -> tuple[int, ...]:
        """Of a layer."""
        return self.num_value_heads, self.key_dim, self.value_dim

    @property
    def slot_bytes(self) -> int:
        """Bytes of one sequence over all layers."""
        of_layer = math.prod(self.seen) * self.dtype.itemsize + math.prod(self.matrices) * torch.float32.itemsize
        return self.num_layers * of_layer


class SlotStates:
    """Of each layer and slot, and after the slots those that are saved; what is written nowhere is never read.

    seen      [layers, states, conv_width, channels]
    matrices  f32[layers, states, value_heads, key_dim, value_dim]
    """

    def __init__(self, shape: StateShape, num_states: int, device: torch.device) -> None:
        self.shape = shape
        self.seen = torch.zeros(shape.num_layers, num_states, *shape.seen, dtype=shape.dtype, device=device)
        self.matrices = torch.zeros(shape.num_layers, num_states, *shape.matrices, device=device)

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copy states; all sources i64[n] are read before a target i64[n] is written."""
        for states in (self.seen, self.matrices):
            for layer in states:  # one after the other: what is read takes memory
                layer.index_copy_(0, targets, layer.index_select(0, sources))
