"""Kinds of layers by what their tokens see, and the KV blocks that a sequence needs of each.

All blocks of a worker have the same bytes. A block of one kind has the keys and values of all layers of that kind, for
as many tokens as these bytes hold: of few layers for many tokens. The block sizes of a model's kinds are multiples of
each other.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Reach(NamedTuple):
    """The tokens that a layer's token sees, of itself and those before it."""

    window: int | None = None  # the last so many; None: all
    chunk: int | None = None  # contexts are cut into so many, of which it sees those of its own; None: all

    @property
    def longest(self) -> int | None:
        """The most tokens that one sees; None: all."""
        return min((bound for bound in self if bound is not None), default=None)

    def first_seen(self, position: int) -> int:
        """The position of the first token that the one at `position`, or any after it, sees."""
        first = 0 if self.window is None else max(0, position - self.window + 1)
        return first if self.chunk is None else max(first, position // self.chunk * self.chunk)

    def unseen_from(self, position: int) -> int | None:
        """The position from which on no token sees the one at `position`; None: all after it do."""
        ends = [] if self.window is None else [position + self.window]
        if self.chunk is not None:
            ends.append((position // self.chunk + 1) * self.chunk)
        return min(ends, default=None)


SEES_ALL = Reach()


@dataclass(frozen=True, slots=True)
class KVKind:
    """Layers whose tokens see as much as each other's."""

    block_size: int  # tokens of a block
    reach: Reach = SEES_ALL

    @property
    def sees_all(self) -> bool:
        """Return whether a token sees all before it, so that no block is given up."""
        return self.reach == SEES_ALL

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks of the first `num_tokens` tokens, those that are given up included."""
        return -(-num_tokens // self.block_size)

    def first_seen(self, position: int) -> int:
        """Index of the first block that the token at `position`, or any after it, sees."""
        return self.reach.first_seen(position) // self.block_size

    def unseen_from(self, index: int) -> int | None:
        """The position from which on no token sees the block of this index; None: all tokens after it do."""
        return self.reach.unseen_from((index + 1) * self.block_size - 1)

    def most_blocks(self, num_tokens: int, longest_step: int) -> int:
        """Blocks that a sequence of up to `num_tokens` tokens holds at once, if no step takes more than `longest_step`
        tokens of it."""
        needed = self.num_blocks(num_tokens)
        if (longest := self.reach.longest) is None:
            return needed
        # A step's first token sees up to `longest` - 1 tokens before it; all of them may begin within a block.
        return min(needed, self.num_blocks(longest + longest_step - 2) + 1)


def blocks_of_sequence(kinds: Sequence[KVKind], num_tokens: int, longest_step: int) -> int:
    """Blocks of all kinds that a sequence of up to `num_tokens` tokens holds at once."""
    return sum(kind.most_blocks(num_tokens, longest_step) for kind in kinds)


def longest_sequence(kinds: Sequence[KVKind], num_blocks: int, longest_step: int, limit: int) -> int:
    """Tokens of the longest sequence that `num_blocks` blocks hold, up to `limit`."""
    lengths = range(limit + 1)
    return bisect_right(lengths, num_blocks, key=lambda length: blocks_of_sequence(kinds, length, longest_step)) - 1
