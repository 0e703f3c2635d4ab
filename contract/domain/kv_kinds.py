"""Kinds of layers by what their tokens see, and the KV blocks that a sequence needs of each.

All blocks of a worker have the same bytes. A block of one kind has the keys and values of all layers of that kind, for
as many tokens as these bytes hold: of few layers for many tokens. The block sizes of a model's kinds are multiples of
each other.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVKind:
    """Layers whose tokens see as much as each other's."""

    block_size: int  # tokens of a block
    window: int | None = None  # tokens that a token sees, itself included; None: all before it

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks of the first `num_tokens` tokens, those that are given up included."""
        return -(-num_tokens // self.block_size)

    def first_seen(self, position: int) -> int:
        """Index of the first block that the token at `position`, or any after it, sees."""
        return 0 if self.window is None else max(0, position - self.window + 1) // self.block_size

    def unseen_from(self, index: int) -> int | None:
        """The position from which on no token sees the block of this index; None: all tokens after it do."""
        return None if self.window is None else (index + 1) * self.block_size + self.window - 1

    def most_blocks(self, num_tokens: int, longest_step: int) -> int:
        """Blocks that a sequence of up to `num_tokens` tokens holds at once, if no step takes more than `longest_step`
        tokens of it."""
        needed = self.num_blocks(num_tokens)
        if self.window is None:
            return needed
        # A step's first token sees `window` - 1 tokens before it; all of them may begin within a block.
        return min(needed, self.num_blocks(self.window + longest_step - 2) + 1)


def blocks_of_sequence(kinds: Sequence[KVKind], num_tokens: int, longest_step: int) -> int:
    """Blocks of all kinds that a sequence of up to `num_tokens` tokens holds at once."""
    return sum(kind.most_blocks(num_tokens, longest_step) for kind in kinds)


def longest_sequence(kinds: Sequence[KVKind], num_blocks: int, longest_step: int, limit: int) -> int:
    """Tokens of the longest sequence that `num_blocks` blocks hold, up to `limit`."""
    lengths = range(limit + 1)
    return bisect_right(lengths, num_blocks, key=lambda length: blocks_of_sequence(kinds, length, longest_step)) - 1
