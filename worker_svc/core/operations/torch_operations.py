"""The reference: plain torch, runs on any device in any dtype."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from worker_svc.core.formats.fp8_channel import Fp8ChannelFormat, kernels_have_fp8
from worker_svc.core.formats.fp8_groups import Fp8GroupsFormat
from worker_svc.core.formats.int4 import Int4Format
from worker_svc.core.formats.interface import Format
from worker_svc.core.formats.stacked.choice import FLOATS_ALONE
from worker_svc.core.kernels.linear.unscaled import Unscaled
from worker_svc.core.operations.interface import Activation, ExpertsLayer, LinearLayer, Norm, RouterLayer
from worker_svc.core.operations.torch_experts import add_experts, gated, score_experts


class TorchOperations:
    """Implement `Operations`; `device`: None where it does not matter."""

    expert_forms = FLOATS_ALONE  # to read others again in every step would cost more than their memory

    def __init__(self, device: torch.device | None = None) -> None:
        self._has_fp8 = device is None or kernels_have_fp8(device)

    def multiplies(self, form: Format, outputs: int, inputs: int, dtype: torch.dtype) -> bool:  # noqa: ARG002
        """Implement `Operations.multiplies`: all but those with scales for groups, for the same reason, and what
        a card has no products of.
        """
        if isinstance(form, Fp8ChannelFormat):
            return self._has_fp8
        return not isinstance(form, Int4Format | Fp8GroupsFormat)

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        """Implement `Operations.norm`."""
        return norm.normalize(x)

    def norm_linear(self, hidden: Tensor, norm: Norm | None, linear: LinearLayer) -> Tensor:
        """Implement `Operations.norm_linear`."""
        return linear.multiply(hidden if norm is None else self.norm(hidden, norm))

    def fold_norm(self, norm: Norm, linear: LinearLayer) -> None:
        """Implement `Operations.fold_norm`: nothing is gained."""

    def norm_linear_unscaled(
        self, hidden: Tensor, norm: Norm | None, linear: LinearLayer
    ) -> tuple[Tensor, Unscaled | None]:
        """Implement `Operations.norm_linear_unscaled`."""
        return self.norm_linear(hidden, norm, linear), None

    def linear_add(self, x: Tensor, linear: LinearLayer, residual: Tensor, after: Norm | None = None) -> Tensor:
        """Implement `Operations.linear_add`."""
        product = linear.multiply(x)
        return residual + (product if after is None else self.norm(product, after))

    def norm_gated(
        self, hidden: Tensor, norm: Norm | None, gate_up: LinearLayer, activation: Activation = "silu"
    ) -> Tensor:
        """Implement `Operations.norm_gated`."""
        gate, up = self.norm_linear(hidden, norm, gate_up).chunk(2, dim=-1)
        return gated(gate, up, activation)

    def norm_gated_add(
        self,
        hidden: Tensor,
        norm: Norm | None,
        gate_up: LinearLayer,
        activation: Activation,
        *,
        down: LinearLayer,
        residual: Tensor,
        after: Norm | None = None,
    ) -> Tensor:
        """Implement `Operations.norm_gated_add`."""
        return self.linear_add(self.norm_gated(hidden, norm, gate_up, activation), down, residual, after)

    def norm_score(self, hidden: Tensor, norm: Norm | None, router: RouterLayer) -> tuple[Tensor, Tensor]:
        """Implement `Operations.norm_score`."""
        x = hidden if norm is None else self.norm(hidden, norm)
        return x, score_experts(x, router)

    def experts_add(self, x: Tensor, scores: Tensor, experts: ExpertsLayer, residual: Tensor) -> Tensor:
        """Implement `Operations.experts_add`."""
        return add_experts(x, scores, experts, residual)

    def sigmoid_scaled(self, gated: Tensor, x: Tensor, gate: Tensor) -> Tensor:
        """Implement `Operations.sigmoid_scaled`."""
        return gated * torch.sigmoid(x @ gate).unsqueeze(-1)

    def sigmoid_gated(self, x: Tensor, gate: Tensor) -> Tensor:
        """Implement `Operations.sigmoid_gated`."""
        return x * torch.sigmoid(gate)

    def norm_silu(self, x: Tensor, norm: Norm, gate: Tensor) -> Tensor:
        """Implement `Operations.norm_silu`."""
        shape = len(x), x.shape[1] // len(norm.weight), len(norm.weight)
        heads, gates = x.reshape(shape), F.silu(gate.reshape(shape).float())
        return (norm.normalize(heads) * gates).to(x.dtype).flatten(1)
