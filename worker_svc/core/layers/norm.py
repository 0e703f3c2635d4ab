"""Root mean square normalisation (Zhang and Sennrich, 2019)."""

import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from worker_svc.core.layers.placement import Placement


class RMSNorm:
    """x / rms(x) * weight over the last dimension; the mean is taken in fp32."""

    def __init__(self, placement: Placement, name: str, size: int, eps: float) -> None:
        self.weight = placement.empty(size)
        self.eps = eps
        self.is_folded = False
        placement.want(f"{name}.weight", self.weight, (size,))

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., size] -> like x."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)

    def fold(self, weight: Tensor) -> None:
        """See `Norm.fold`; each product is rounded once."""
        weight.mul_(self.weight)
        self.weight.fill_(1)
        self.is_folded = True
