"""Tensor-parallel ranks of one worker: what they exchange."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Group:
    """The ranks that hold one model together; `process_group` is None where there is only one."""

    rank: int = 0
    world_size: int = 1
    process_group: dist.ProcessGroup | None = None

    def all_reduce(self, partial: Tensor) -> Tensor:
        """The sum over ranks, in place."""
        if self.process_group is not None:
            dist.all_reduce(partial, group=self.process_group)
        return partial

    def all_gather_columns(self, shard: Tensor) -> Tensor:
        """[rows, columns] of each rank -> [rows, columns * world_size], in the order of ranks."""
        if self.process_group is None:
            return shard
        shard = shard.contiguous()
        gathered = [torch.empty_like(shard) for _ in range(self.world_size)]
        dist.all_gather(gathered, shard, group=self.process_group)
        return torch.cat(gathered, dim=-1)

    def minimum(self, value: int, device: torch.device) -> int:
        """The smallest of the ranks' values."""
        if self.process_group is None:
            return value
        smallest = torch.tensor([value], dtype=torch.int64, device=device)
        dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=self.process_group)
        return int(smallest.item())

    def is_same(self, value: int, device: torch.device) -> bool:
        """Return whether all ranks have this value."""
        return self.minimum(value, device) == -self.minimum(-value, device)

    def broadcast(self, payload: bytes, device: torch.device) -> bytes:
        """Get what rank 0 gave, once all have come here; all ranks give equally many bytes."""
        if self.process_group is None:
            return payload
        self.minimum(0, device)  # rank 0 and others would go on without waiting for all
        data = torch.tensor(list(payload), dtype=torch.uint8, device=device)
        dist.broadcast(data, 0, group=self.process_group)
        return bytes(data.tolist())

    def close(self) -> None:
        """Leave the group."""
        if self.process_group is not None:
            dist.destroy_process_group(self.process_group)
