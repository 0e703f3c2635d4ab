"""Root mean square normalisation (Zhang and Sennrich, 2019), and layer normalisation (Ba et al., 2016)."""

from typing import TypeAlias, overload

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from worker_svc.core.distributed import Group
from worker_svc.core.layers.fusion import Normed, Product, Projected
from worker_svc.core.layers.placement import Placement
from worker_svc.core.models.spec import NormSpec


class RMSNorm:
    """x / rms(x) * weight over the last dimension; the mean is taken in fp32."""

    def __init__(
        self, placement: Placement, spec: NormSpec, size: int, *, part: slice | None = None, is_of_head: bool = False
    ) -> None:
        """`part`: x is split over the ranks, and this is what this one has. `is_of_head`: see the field."""
        here = part or slice(0, size)
        self.group = placement.group if part is not None else Group()
        # One more than a small number is rounded in half precision.
        self.weight = placement.empty(here.stop - here.start, dtype=torch.float32 if spec.offset else None)
        self._offset = spec.offset
        self.eps = spec.eps
        self.is_of_head = is_of_head  # of each head of queries or keys, not of a whole row
        self.is_folded = False
        if spec.name is None:
            self.weight.fill_(1)
        else:
            placement.want(f"{spec.name}.weight", self.weight, (size,), here)

    def prepare(self, order: Tensor | None = None) -> None:
        """Bring the weight into the form in which it is multiplied, once, when it is there.

        order: i64[size], what it is for comes in another order than it is stored.
        """
        if self._offset:
            self.weight.add_(self._offset)
        if order is not None:
            self.weight.copy_(self.weight[order])

    @property
    def is_whole(self) -> bool:
        """Implement `Norm.is_whole`."""
        return self.group.world_size == 1

    @overload
    def __call__(self, x: Tensor) -> Normed: ...
    @overload
    def __call__(self, x: Product) -> Product: ...
    @overload
    def __call__(self, x: Projected) -> Projected: ...
    def __call__(self, x: Tensor | Product | Projected) -> Normed | Product | Projected:
        """norm(x), computed by whoever reads it."""
        if isinstance(x, Product):
            return Product(x.linear, x.x, after=self)
        if isinstance(x, Projected):
            return Projected(x.product, x.number, norm=self)
        return Normed(x, self)

    def normalize(self, x: Tensor) -> Tensor:
        """x [..., size] -> like x: by torch."""
        if self.is_whole and self.weight.dtype == x.dtype:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        mean = self.group.all_reduce(x.float().square().mean(-1, keepdim=True)) / self.group.world_size
        return (x.float() * (mean + self.eps).rsqrt() * self.weight).to(x.dtype)

    def fold(self, weight: Tensor) -> None:
        """Implement `Norm.fold`; each product is rounded once."""
        weight.mul_(self.weight)
        self.weight.fill_(1)
        self.is_folded = True


class LayerNorm:
    """(x - mean(x)) / deviation(x) * weight over the last dimension; computed at once, in fp32."""

    def __init__(self, placement: Placement, spec: NormSpec, size: int) -> None:
        assert spec.name is not None, "a layer norm has a weight"
        assert not spec.offset, "a layer norm has its weight as it is stored"
        self.weight = placement.empty(size)
        self._eps = spec.eps
        placement.want(f"{spec.name}.weight", self.weight, (size,))

    def prepare(self) -> None:
        """Nothing is to be done once the weight is there."""

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., size] -> like x."""
        weight = self.weight.float()
        return F.layer_norm(x.float(), weight.shape, weight, eps=self._eps).to(x.dtype)


BlockNorm: TypeAlias = RMSNorm | LayerNorm


def make_norm(placement: Placement, spec: NormSpec, size: int) -> BlockNorm:
    """The norm of what a block reads."""
    return LayerNorm(placement, spec, size) if spec.is_centered else RMSNorm(placement, spec, size)
