"""Parts of layers that products are asked with."""

from dataclasses import dataclass

from kernel_inputs import DEVICE, DTYPE, randn
from torch import Tensor

from worker_svc.core.formats.interface import Packed
from worker_svc.core.layers.norm import RMSNorm
from worker_svc.core.layers.placement import Placement
from worker_svc.core.models.spec import NormSpec


def norm_of(size: int) -> RMSNorm:
    """Of weights near one."""
    norm = RMSNorm(Placement(DEVICE, DTYPE), NormSpec("norm", 1e-6), size)
    norm.weight.copy_(1 + randn(size, seed=3, scale=0.2))
    return norm


@dataclass
class OfARank:
    """A linear layer whose sum over ranks is known."""

    packed: Packed
    bias: Tensor | None = None
    is_partial: bool = True

    def multiply(self, x: Tensor) -> Tensor:
        raise AssertionError("torch would widen the weight in each step")

    def total(self, part: Tensor) -> Tensor:
        return 2 * part + 1
