"""Where a model's weights live, and which part of each tensor of a checkpoint a rank holds."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from penstock.domain.errors import unimplemented
from worker_svc.core.distributed import Group
from worker_svc.core.operations.interface import Operations
from worker_svc.core.operations.torch_operations import TorchOperations


@dataclass(frozen=True, slots=True)
class Shard:
    """One tensor of a checkpoint: `destination` takes its part `index` (a slice per dimension)."""

    destination: Tensor
    shape: tuple[int, ...]  # of the whole tensor, as stored
    index: tuple[slice, ...]


@dataclass(frozen=True)
class Placement:
    """Device, dtype, ranks, and what computes there; collects the shards that layers want of a checkpoint, by name."""

    device: torch.device
    dtype: torch.dtype
    group: Group = field(default_factory=Group)
    operations: Operations = field(default_factory=TorchOperations)
    shards: dict[str, Shard] = field(default_factory=dict)

    def empty(self, *shape: int) -> Tensor:
        """Room for a weight."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def want(self, name: str, destination: Tensor, shape: tuple[int, ...], *index: slice) -> None:
        """Ask for `name`, of `shape` in the checkpoint; dimensions without a slice are taken whole."""
        self.shards[name] = Shard(destination, shape, index + (slice(None),) * (len(shape) - len(index)))

    def part(self, size: int, what: str) -> slice:
        """This rank's part of `size` equal units (heads, columns).

        Raises:
            PenstockError: UNIMPLEMENTED, `size` does not divide by the number of ranks.
        """
        world_size, rank = self.group.world_size, self.group.rank
        if size % world_size:
            raise unimplemented(f"{what} ({size}) over {world_size} tensor-parallel ranks, which do not divide it,")
        units = size // world_size
        return slice(rank * units, (rank + 1) * units)

    def kv_heads(self, num_kv_heads: int) -> slice:
        """This rank's key-value heads; ranks share one where there are more ranks than heads."""
        world_size, rank = self.group.world_size, self.group.rank
        if num_kv_heads >= world_size:
            return self.part(num_kv_heads, "num_key_value_heads")
        if world_size % num_kv_heads:
            raise unimplemented(f"{num_kv_heads} key-value heads over {world_size} tensor-parallel ranks")
        head = rank * num_kv_heads // world_size
        return slice(head, head + 1)
