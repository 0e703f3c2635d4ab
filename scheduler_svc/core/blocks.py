"""The KV blocks of one worker: reference counts, and full blocks that are found again by their content.

Paging as in Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention" (2023).
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from contract.domain.plan import U32
from scheduler_svc.core.block_map import BlockMap

HASH_BYTES = 16


def root_hash(tenant: str, salt: str) -> bytes:
    """The parent of a sequence's first block; sequences of different tenants or with different salts share no blocks.

    The same in every scheduler, so that a request that is taken over hashes as before.
    """
    owner = tenant.encode()
    # With the length of the first: no tenant and salt are another tenant's with another salt.
    return hashlib.blake2b(len(owner).to_bytes(4, "little") + owner + salt.encode(), digest_size=HASH_BYTES).digest()


def extend_hashes(hashes: list[bytes], root: bytes, token_ids: U32, block_size: int) -> None:
    """Append the hashes of the full blocks in `token_ids`, u32[tokens], which stand after those of `hashes`.

    Each hash is BLAKE2b-128 over its parent's and the block's token ids, so equal hashes mean equal prefixes.
    """
    parent = hashes[-1] if hashes else root
    data = token_ids.astype("<u4", copy=False).tobytes()
    width = 4 * block_size
    for start in range(0, len(data) - width + 1, width):
        parent = hashlib.blake2b(parent + data[start : start + width], digest_size=HASH_BYTES).digest()
        hashes.append(parent)


def hash_of_kind(block_hash: bytes, kind: int) -> bytes:
    """The hash of a block of one kind of layers, which has no other kind's content."""
    return block_hash + bytes((kind,)) if kind else block_hash


def hashes_of_kind(hashes: Sequence[bytes], kind: int, factor: int) -> Sequence[bytes]:
    """The hashes of a sequence's full blocks of one kind, of which each is as long as `factor` of those of `hashes`."""
    if kind == 0 and factor == 1:
        return hashes
    return [hash_of_kind(each, kind) for each in hashes[factor - 1 :: factor]]


class BlockManager:
    """The holders of each block.

    A block is held by `ref_counts[block]` sequences, or free. A free block that still has a hash waits in LRU order
    and may be held again; one without is handed out first.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self.hashes: list[bytes | None] = [None] * num_blocks
        self.found: dict[bytes, int] = {}
        self.empty = list(range(num_blocks - 1, -1, -1))
        self.idle: OrderedDict[int, None] = OrderedDict()  # free with a hash, least recently used first
        self.map = BlockMap(num_blocks)

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated, those with a hash included."""
        return len(self.empty) + len(self.idle)

    @property
    def num_cached(self) -> int:
        """Free blocks that keep their content."""
        return len(self.idle)

    @property
    def num_used(self) -> int:
        """Blocks that sequences hold."""
        return self.num_blocks - self.num_free

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks (the caller has checked `num_free`), forgetting the oldest content if need be."""
        blocks = []
        for _ in range(count):
            if self.empty:
                block = self.empty.pop()
                self.map.hold(block, was_cached=False)
            else:
                block, _ = self.idle.popitem(last=False)
                self.map.hold(block, was_cached=True)
                self._forget(block)
            self.ref_counts[block] = 1
            blocks.append(block)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Hold blocks once more: those of a sibling, or free ones that `find` named."""
        for block in blocks:
            if self.ref_counts[block] == 0:
                del self.idle[block]
                self.map.hold(block, was_cached=True)
            self.ref_counts[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Let go of a sequence's table. Its last block is reused first, since fewer prefixes run through it."""
        for block in reversed(blocks):
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                is_cached = self.hashes[block] is not None
                self.map.release(block, is_cached=is_cached)
                if is_cached:
                    self.idle[block] = None
                else:
                    self.empty.append(block)

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks of the longest known prefix of `hashes`; nothing is held by asking."""
        blocks = []
        for block_hash in hashes:
            block = self.found.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_idle(self, blocks: Iterable[int]) -> int:
        """The number of `blocks` that are free: holding them takes them out of `num_free`."""
        return sum(self.ref_counts[block] == 0 for block in blocks)

    def register(self, block: int, block_hash: bytes) -> None:
        """Make a full, held block findable. The first block with a content stays the one that is found, as long as
        somebody holds it: one that is free may be forgotten before this one is let go of.
        """
        known = self.found.get(block_hash)
        if known is not None and self.ref_counts[known] == 0:
            self._forget(known)
            del self.idle[known]
            self.empty.append(known)
            self.map.forget(known)
            known = None
        if known is None:
            self.found[block_hash] = block
            self.hashes[block] = block_hash

    def _forget(self, block: int) -> None:
        block_hash = self.hashes[block]
        if block_hash is not None:
            del self.found[block_hash]
            self.hashes[block] = None
