"""The blocks of a worker in groups: how many of each are held or keep content, small enough to be told often."""

from dataclasses import dataclass

MAX_GROUPS = 256
_FULL = 255


@dataclass(frozen=True, slots=True)
class BlockShares:
    """A snapshot: the shares of each group, in the order of its blocks, 0 to 255; more than nothing is at least 1."""

    group_size: int  # blocks; of the last group there may be fewer
    used: bytes  # held by sequences
    cached: bytes  # free, with content that can be found again


class BlockMap:
    """Counts by group; every change of a block is told when it happens, since counting all takes a step's time."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self.group_size = max(1, -(-num_blocks // MAX_GROUPS))
        num_groups = -(-num_blocks // self.group_size)
        self.used = [0] * num_groups
        self.cached = [0] * num_groups

    def hold(self, block: int, *, was_cached: bool) -> None:
        """A free block is held from now on."""
        group = block // self.group_size
        self.used[group] += 1
        self.cached[group] -= was_cached

    def release(self, block: int, *, is_cached: bool) -> None:
        """A block is free from now on."""
        group = block // self.group_size
        self.used[group] -= 1
        self.cached[group] += is_cached

    def forget(self, block: int) -> None:
        """A free block keeps its content no longer."""
        self.cached[block // self.group_size] -= 1

    def shares(self) -> BlockShares:
        """A snapshot."""
        sizes = [self.group_size] * len(self.used)
        sizes[-1:] = [self._num_blocks - self.group_size * (len(sizes) - 1)] if sizes else []
        used, cached = (
            bytes(-(-_FULL * count // size) for count, size in zip(counts, sizes, strict=True))
            for counts in (self.used, self.cached)
        )
        return BlockShares(self.group_size, used, cached)
