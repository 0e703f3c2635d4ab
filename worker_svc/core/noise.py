"""Random numbers that depend on a seed, a position and a counter and on nothing else, on any device.

The v-th number is the v-th output of SplitMix64 (Steele, Lea and Flood, 2014) started from a mix of seed and position;
integer arithmetic modulo 2**64 is the same everywhere.
"""

import torch
from torch import Tensor

_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_MUL1 = 0xBF58476D1CE4E5B9 - 2**64
_MUL2 = 0x94D049BB133111EB - 2**64
_BELOW_ONE = 1 - 2**-24


def mix(value: Tensor) -> Tensor:
    """`contract.domain.chain.mix` for i64 tensors (two's complement)."""
    value = value + _GAMMA
    value.bitwise_xor_((value >> 30).bitwise_and_((1 << 34) - 1)).mul_(_MUL1)
    value.bitwise_xor_((value >> 27).bitwise_and_((1 << 37) - 1)).mul_(_MUL2)
    return value.bitwise_xor_((value >> 31).bitwise_and_((1 << 33) - 1))


def uniform(seeds: Tensor, positions: Tensor, counters: Tensor) -> Tensor:
    """The numbers in (0, 1) that stand at `counters` i64[rows, n]: seeds and positions i64[rows] -> f32[rows, n]; small
    ones keep full precision.
    """
    keys = mix(seeds ^ mix(positions))
    bits = mix(keys.unsqueeze(1) + counters * _GAMMA)
    high = (bits >> 32).bitwise_and_((1 << 32) - 1)
    return high.to(torch.float32).add_(0.5).mul_(2.0**-32).clamp_(max=_BELOW_ONE)
