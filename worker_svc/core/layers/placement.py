"""The device of a model's weights, and the part of each tensor of a checkpoint that a rank holds."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from contract.domain.errors import unimplemented
from worker_svc.core.distributed import Group
from worker_svc.core.formats.choice import find_format
from worker_svc.core.formats.interface import Format
from worker_svc.core.models.quantization import QuantizationSpec
from worker_svc.core.operations.interface import Operations
from worker_svc.core.operations.torch_operations import TorchOperations


@dataclass(frozen=True, slots=True)
class WantedTensor:
    """One tensor of a checkpoint: `destination` takes its part `index` (a slice per dimension)."""

    name: str
    destination: Tensor
    shape: tuple[int, ...]  # of the whole tensor, as stored
    index: tuple[slice, ...]


@dataclass(frozen=True)
class Placement:
    """Device, dtype, ranks, formats, and what computes there; collects what layers want of a checkpoint."""

    device: torch.device
    dtype: torch.dtype
    group: Group = field(default_factory=Group)
    operations: Operations = field(default_factory=TorchOperations)
    quantization: QuantizationSpec | None = None
    wanted: list[WantedTensor] = field(default_factory=list)  # a stored tensor may have several

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Room for a weight, in the model's dtype unless another is given."""
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    def format_of(self, name: str) -> Format:
        """The format of the linear layer called `name` in the checkpoint."""
        return find_format(self.quantization, name)

    def want(self, name: str, destination: Tensor, shape: tuple[int, ...], *index: slice) -> None:
        """Ask for `name`, of `shape` in the checkpoint; dimensions without a slice are taken whole."""
        self.wanted.append(WantedTensor(name, destination, shape, index + (slice(None),) * (len(shape) - len(index))))

    def part(self, size: int, what: str) -> slice:
        """This rank's part of `size` equal units (heads).

        Raises:
            PenstockError: UNIMPLEMENTED, `size` does not divide by the number of ranks.
        """
        if size % self.group.world_size:
            raise unimplemented(
                f"{what} ({size}) over {self.group.world_size} tensor-parallel ranks, which do not divide it,"
            )
        return self.columns(size)

    def columns(self, size: int, unit: int = 1) -> slice:
        """This rank's part of `size` numbers, cut between groups of `unit`; the first ranks may have a group more."""
        world_size, rank = self.group.world_size, self.group.rank
        each, more = divmod(-(-size // unit), world_size)
        first, last = (min(size, (each * number + min(number, more)) * unit) for number in (rank, rank + 1))
        return slice(first, last)

    def kv_heads(self, num_kv_heads: int) -> slice:
        """This rank's key-value heads; ranks share one where there are more ranks than heads."""
        world_size, rank = self.group.world_size, self.group.rank
        if num_kv_heads >= world_size:
            return self.part(num_kv_heads, "num_key_value_heads")
        if world_size % num_kv_heads:
            raise unimplemented(f"{num_kv_heads} key-value heads over {world_size} tensor-parallel ranks")
        head = rank * num_kv_heads // world_size
        return slice(head, head + 1)
