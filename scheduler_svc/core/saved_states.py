"""The states that a worker has saved: what layers keep of a sequence's first tokens instead of keys and values.

A state stands for all tokens of a prefix and for no fewer, so it is of use to a sequence that begins with all of them,
together with the blocks of that prefix.
"""

from collections import OrderedDict
from collections.abc import Sequence


class SavedStates:
    """The saved states of one worker, found by the hash of the last block of their prefix. Where all are taken, the one
    that was used least recently is forgotten.

    A plan that begins a sequence with a state may save another in its place: the worker reads before it computes, and
    saves after that. It saves no more than there are, so that none takes the place of another of the same plan.
    """

    def __init__(self, first: int, count: int) -> None:
        """`count` states, whose indices on the worker begin with `first`."""
        self.indices = range(first, first + count)
        self.empty = list(reversed(self.indices))
        self.found: dict[bytes, int] = {}
        self.hashes: OrderedDict[int, bytes] = OrderedDict()  # of those in use, least recently used first

    @property
    def num_used(self) -> int:
        """Those that stand for a prefix."""
        return len(self.found)

    def longest(self, hashes: Sequence[bytes], num_blocks: int) -> int:
        """The most of the first `num_blocks` blocks of a sequence after which a state is known; 0: there is none."""
        return next((count for count in range(num_blocks, 0, -1) if hashes[count - 1] in self.found), 0)

    def use(self, index: int) -> None:
        """Note that a sequence begins with a state, or has come by it."""
        self.hashes.move_to_end(index)

    def save(self, block_hash: bytes) -> int | None:
        """The index to save a state at, from now on known by its hash; None: it is known already."""
        if (known := self.found.get(block_hash)) is not None:
            self.use(known)
            return None
        if self.empty:
            index = self.empty.pop()
        else:
            index, forgotten = self.hashes.popitem(last=False)
            del self.found[forgotten]
        self.found[block_hash], self.hashes[index] = index, block_hash
        return index


def save_points(*, num_tokens: int, num_begun: int, num_found: int, step: int, least: int) -> list[int]:
    """The numbers of tokens after which a prompt's state is saved, in ascending order.

    That is where the blocks ended that were found, so that the next one that shares as much need not compute it; and
    at the prompt's last whole block, for one that goes on from it.

    Args:
        num_tokens: of the prompt.
        num_begun: tokens whose state the sequence begins with.
        num_found: tokens whose blocks were found, with a state or without.
        step: tokens of a block, of the kind of layers whose blocks have the most.
        least: tokens that a state must save whoever begins with it, over the one before: it costs a step of its own.
    """
    points = [num_begun]
    for end in (num_found, (num_tokens - 1) // step * step):
        if end - points[-1] >= least:
            points.append(end)
    return points[1:]
