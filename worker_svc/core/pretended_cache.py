"""The simulated runner's KV cache: token ids in blocks, and a hash of any context that is read through a block table.

The hash of tokens t0, t1, ... is the polynomial sum of mix(ti + 1) * BASE**i modulo 2**64. A block's own sum is kept up
to date as cells are written, so that a long context costs one addition a block; where a block stands in the table
decides the power of BASE that its sum is multiplied with. The last block of a context may have cells behind its end,
which belong to others: its cells are read one by one.
"""

import numpy as np
import numpy.typing as npt

from penstock.domain import chain
from penstock.domain.plan import U32
from worker_svc.core.slots import I64

U64 = npt.NDArray[np.uint64]

BASE = chain.mix(0) | 1
_POISON = 2**32 - 1  # no vocabulary is that large
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MUL1 = np.uint64(0xBF58476D1CE4E5B9)
_MUL2 = np.uint64(0x94D049BB133111EB)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)
_ONE = np.uint64(1)


def mix(values: U64) -> U64:
    """`penstock.domain.chain.mix` of every value."""
    values = values + _GAMMA
    values = (values ^ (values >> _SHIFTS[0])) * _MUL1
    values = (values ^ (values >> _SHIFTS[1])) * _MUL2
    return values ^ (values >> _SHIFTS[2])


def context_term(token_id: int) -> int:
    """What a token adds to the hash of a context, before its position weighs it."""
    return chain.mix(token_id + 1)


def _terms(token_ids: U32) -> U64:
    return mix(token_ids.astype(np.uint64) + _ONE)


class PretendedCache:
    """cells u32[num_blocks, block_size] and the sums u64[num_blocks] of their weighted terms."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._weights = _powers(BASE, block_size)
        self._block_weights = _powers(pow(BASE, block_size, 2**64), 64)
        self._poison_sum = (_terms(np.full(block_size, _POISON, np.uint32)) * self._weights).sum()
        self._cells = np.empty((num_blocks, block_size), np.uint32)
        self._sums = np.empty(num_blocks, np.uint64)
        self.poison_all()

    def poison_all(self) -> None:
        """Make all that was written unreadable."""
        self._cells.fill(_POISON)
        self._sums.fill(self._poison_sum)

    def poison(self, blocks: npt.NDArray[np.integer]) -> None:
        """Make what was written to `blocks` unreadable: they have a new owner."""
        self._cells[blocks] = _POISON
        self._sums[blocks] = self._poison_sum

    def copy(self, sources: U32, targets: U32) -> None:
        """Copy whole blocks; all sources are read before a target is written."""
        self._cells[targets] = self._cells[sources]
        self._sums[targets] = self._sums[sources]

    def write(self, slot_mapping: I64, token_ids: U32) -> None:
        """Put token i of `token_ids` into cell `slot_mapping[i]` (block * block_size + offset)."""
        blocks, offsets = slot_mapping // self._block_size, slot_mapping % self._block_size
        changes = (_terms(token_ids) - _terms(self._cells[blocks, offsets])) * self._weights[offsets]
        np.add.at(self._sums, blocks, changes)
        self._cells[blocks, offsets] = token_ids

    def context_hashes(self, block_tables: I64, num_tokens: I64) -> U64:
        """Hash of the first `num_tokens[i]` tokens that row i of `block_tables` leads to: u64[rows]."""
        num_full, rest = num_tokens // self._block_size, num_tokens % self._block_size
        longest = int(num_full.max(initial=0))
        if longest >= len(self._block_weights):
            self._block_weights = _powers(pow(BASE, self._block_size, 2**64), 2 * longest)
        sums = self._sums[block_tables[:, :longest]]
        sums *= self._block_weights[:longest]
        sums *= np.arange(longest) < num_full[:, None]
        last = block_tables[np.arange(len(num_full)), np.minimum(num_full, block_tables.shape[1] - 1)]
        terms = _terms(self._cells[last])
        terms *= self._weights
        terms *= np.arange(self._block_size) < rest[:, None]
        hashes: U64 = sums.sum(axis=1) + terms.sum(axis=1) * self._block_weights[num_full]
        return hashes


def _powers(base: int, count: int) -> U64:
    """base**0, base**1, ... modulo 2**64."""
    powers = np.full(count, base, np.uint64)
    powers[0] = 1
    return np.multiply.accumulate(powers)
