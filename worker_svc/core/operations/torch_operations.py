"""The reference: plain torch, runs on any device in any dtype."""

import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from worker_svc.core.operations.interface import Norm, Projection, Reduction, Unscaled


class TorchOperations:
    """See `Operations`."""

    def norm_linear(self, hidden: Tensor, norm: Norm, linear: Projection) -> Tensor:
        """See `Operations.norm_linear`."""
        return linear(norm(hidden))

    def fold_norm(self, norm: Norm, linear: Projection) -> None:
        """See `Operations.fold_norm`: nothing is gained."""

    def norm_linear_unscaled(self, hidden: Tensor, norm: Norm, linear: Projection) -> tuple[Tensor, Unscaled | None]:
        """See `Operations.norm_linear_unscaled`."""
        return self.norm_linear(hidden, norm, linear), None

    def linear_add(self, x: Tensor, linear: Reduction, residual: Tensor) -> Tensor:
        """See `Operations.linear_add`."""
        return residual + linear(x)

    def norm_gated(self, hidden: Tensor, norm: Norm, gate_up: Projection) -> Tensor:
        """See `Operations.norm_gated`."""
        gate, up = gate_up(norm(hidden)).chunk(2, dim=-1)
        return F.silu(gate) * up
