"""The simulated runner's KV cache: token ids in blocks, and a hash of any context that is read through a block table.

The hash of tokens t0, t1, ... is the polynomial sum of mix(ti + 1) * BASE**i modulo 2**64. A block's own sum is kept up
to date as KV slots are written, so that a long context costs one addition a block; where a block stands in the table
decides the power of BASE that its sum is multiplied with. The last block of a context may have slots after its end,
which belong to others: its slots are read one by one.
"""

import numpy as np
import numpy.typing as npt

from contract.domain import chain
from contract.domain.plan import U32
from worker_svc.core.slots import I64

U64 = npt.NDArray[np.uint64]

BASE = chain.mix(0) | 1
_POISON = 2**32 - 1  # no vocabulary is that large
_ONE = np.uint64(1)


def context_term(token_id: int) -> int:
    """The term that a token adds to the hash of a context, before its position weighs it."""
    return chain.mix(token_id + 1)


def terms_of(token_ids: U32) -> U64:
    """As `context_term`, of each token: u64[tokens]."""
    values = token_ids.astype(np.uint64)
    values += _ONE
    return chain.mix_columns(values)


class PretendedCache:
    """The terms that each KV slot's token adds to a hash, u64[pages, block_size], and these numbers' weighted sums
    u64[pages]. A block of few layers has several pages, one after the other; see `HostSlots`.
    """

    def __init__(self, num_blocks: int, block_size: int, num_pages: int = 1) -> None:
        self._block_size = block_size
        self._offsets = np.arange(block_size)
        self._weights = _powers(BASE, block_size)
        self._block_weights = _powers(pow(BASE, block_size, 2**64), 64)
        self._poison_term = terms_of(np.array([_POISON], np.uint32))[0]
        self._poison_sum = (np.full(block_size, self._poison_term) * self._weights).sum()
        self._cells = np.empty((num_blocks * num_pages, block_size), np.uint64)
        self._sums = np.empty(num_blocks * num_pages, np.uint64)
        self._cells_of_blocks = self._cells.reshape(num_blocks, num_pages, block_size)
        self._sums_of_blocks = self._sums.reshape(num_blocks, num_pages)
        self.poison_all()

    def poison_all(self) -> None:
        """Make all that was written unreadable."""
        self._cells.fill(self._poison_term)
        self._sums.fill(self._poison_sum)

    def poison(self, blocks: npt.NDArray[np.integer]) -> None:
        """Make what was written to `blocks` unreadable: they have a new owner."""
        if len(blocks):
            self._cells_of_blocks[blocks] = self._poison_term
            self._sums_of_blocks[blocks] = self._poison_sum

    def copy(self, sources: U32, targets: U32) -> None:
        """Copy whole blocks; all sources are read before a target is written."""
        if len(sources):
            self._cells_of_blocks[targets] = self._cells_of_blocks[sources]
            self._sums_of_blocks[targets] = self._sums_of_blocks[sources]

    def write(self, slot_mapping: I64, token_ids: U32) -> None:
        """Put token i of `token_ids` into KV slot `slot_mapping[i]` (block * block_size + offset)."""
        blocks = slot_mapping // self._block_size
        offsets = slot_mapping - blocks * self._block_size
        terms = terms_of(token_ids)
        np.add.at(self._sums, blocks, (terms - self._cells[blocks, offsets]) * self._weights[offsets])
        self._cells[blocks, offsets] = terms

    def context_hashes(self, block_tables: I64, num_tokens: I64) -> U64:
        """Hash of the first `num_tokens[i]` tokens that row i of `block_tables` leads to: u64[rows]."""
        num_full = num_tokens // self._block_size
        rest = num_tokens - num_full * self._block_size
        longest = int(num_full.max(initial=0))
        if longest >= len(self._block_weights):
            self._block_weights = _powers(pow(BASE, self._block_size, 2**64), 2 * longest)
        sums = self._sums[block_tables[:, :longest]]
        sums *= self._block_weights[:longest]
        if np.count_nonzero(num_full < longest):
            sums *= np.arange(longest) < num_full[:, None]
        last = block_tables[np.arange(len(num_full)), np.minimum(num_full, block_tables.shape[1] - 1)]
        terms = self._cells[last]
        terms *= self._weights
        terms *= self._offsets < rest[:, None]
        hashes: U64 = sums.sum(axis=1) + terms.sum(axis=1) * self._block_weights[num_full]
        return hashes

    def are_foreign(self, block_tables: I64, token_ids: U32, firsts: I64, num_tokens: I64) -> npt.NDArray[np.bool_]:
        """The rows of `block_tables` that do not lead to the tokens of `token_ids[i]` from `firsts[i]` on, before
        `num_tokens[i]`: bool[rows]."""
        positions = firsts[:, None] + np.arange(int((num_tokens - firsts).max(initial=0)))
        is_there = positions < num_tokens[:, None]
        positions = np.where(is_there, positions, 0)
        rows = np.arange(len(num_tokens))[:, None]
        pages = block_tables[rows, positions // self._block_size]
        terms = self._cells[pages, positions % self._block_size]
        expected = terms_of(token_ids[rows, positions].ravel()).reshape(terms.shape)
        found: npt.NDArray[np.bool_] = ((terms != expected) & is_there).any(axis=1)
        return found


def token_hashes(token_ids: U32, num_tokens: I64) -> U64:
    """Hash of the first `num_tokens[i]` of `token_ids[i]`, as of a context in the cache: u64[rows]."""
    longest = int(num_tokens.max(initial=0))
    terms = terms_of(token_ids[:, :longest].ravel()).reshape(len(num_tokens), longest)
    terms *= _powers(BASE, longest + 1)[:longest]
    terms *= np.arange(longest) < num_tokens[:, None]
    hashes: U64 = terms.sum(axis=1)
    return hashes


def _powers(base: int, count: int) -> U64:
    """base**0, base**1, ... modulo 2**64."""
    powers = np.full(count, base, np.uint64)
    powers[0] = 1
    return np.multiply.accumulate(powers)


def powers(count: int) -> U64:
    """The weights of a context's tokens, by position: u64[count]."""
    return _powers(BASE, count)
