"""Derived 64-bit numbers: the hash chain over a sequence's output tokens, and the seeds of parallel samples.

Both use the finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15
_MUL1 = 0xBF58476D1CE4E5B9
_MUL2 = 0x94D049BB133111EB

_COLUMN_ONE, _COLUMN_GAMMA, _COLUMN_MUL1, _COLUMN_MUL2 = map(np.uint64, (1, _GAMMA, _MUL1, _MUL2))
_COLUMN_SHIFTS = tuple(map(np.uint64, (30, 27, 31)))
_FEW = 8  # numbers that are mixed faster one by one than as a column

CHAIN_START = 0x243F6A8885A308D3  # the hash of no tokens


def mix(value: int) -> int:
    """SplitMix64's bijection of a 64-bit number."""
    value = (value + _GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * _MUL1) & _MASK
    value = ((value ^ (value >> 27)) * _MUL2) & _MASK
    return value ^ (value >> 31)


def extend(chain: int, token_ids: Iterable[int]) -> int:
    """The hash of a sequence that had hash `chain` and got `token_ids` after it."""
    for token_id in token_ids:
        chain = mix(chain ^ (token_id + 1))
    return chain


def extend_columns(chains: npt.NDArray[np.uint64], token_ids: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint64]:
    """`extend` by one token for many sequences: chains u64[rows], token_ids u32[rows] -> u64[rows]."""
    values = token_ids.astype(np.uint64)
    values += _COLUMN_ONE
    values ^= chains
    return mix_columns(values)


def mix_columns(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """`mix` of every value u64[rows]; may be done in their place (arrays wrap around without a word)."""
    if len(values) < _FEW:
        return np.array(list(map(mix, values.tolist())), np.uint64)
    values += _COLUMN_GAMMA
    values ^= values >> _COLUMN_SHIFTS[0]
    values *= _COLUMN_MUL1
    values ^= values >> _COLUMN_SHIFTS[1]
    values *= _COLUMN_MUL2
    values ^= values >> _COLUMN_SHIFTS[2]
    return values


def sequence_seed(seed: int, sequence: int) -> int:
    """The seed (unsigned 64-bit) of sample `sequence` of a request; sample 0 keeps the request's own."""
    seed &= _MASK
    return seed if sequence == 0 else mix(seed ^ mix(sequence))
