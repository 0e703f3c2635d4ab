"""Fused kernels for half precision on CUDA. Products are those of the weights' format; around them stand the norms, of
which the weight is folded into the product after it and the scale of each row is left to the kernel after that, and the
gate, where the product does not take it along.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from worker_svc.core.formats.dense import Dense
from worker_svc.core.formats.fp8_channel import Fp8Channel, Fp8ChannelFormat, kernels_have_fp8
from worker_svc.core.formats.fp8_groups import Fp8Groups, Fp8GroupsFormat
from worker_svc.core.formats.int4 import Int4, Int4Format
from worker_svc.core.formats.interface import Format
from worker_svc.core.formats.stacked.choice import kernel_forms
from worker_svc.core.kernels.delta.gates import norm_silu, sigmoid_gated
from worker_svc.core.kernels.experts.activation import scale_by_sigmoid
from worker_svc.core.kernels.linear.activation import silu_mul
from worker_svc.core.kernels.linear.norm import norm_add, rms_norm
from worker_svc.core.kernels.linear.table import Line
from worker_svc.core.kernels.linear.unscaled import MOST_SCALED_ROWS, Unscaled
from worker_svc.core.operations.dense_multiplier import DenseMultiplier
from worker_svc.core.operations.fp8_group_kernels import Fp8GroupKernels
from worker_svc.core.operations.fp8_multiplier import Fp8Multiplier
from worker_svc.core.operations.grouped_multiplier import GroupedMultiplier
from worker_svc.core.operations.int4_kernels import Int4Kernels
from worker_svc.core.operations.interface import Activation, ExpertsLayer, LinearLayer, Norm, RouterLayer
from worker_svc.core.operations.multiplier import Multiplier, PlainMultiplier
from worker_svc.core.operations.triton_experts import add_experts, norm_score


class TritonOperations:
    """Implement `Operations`; for use on one stream. See `DenseMultiplier`."""

    def __init__(self, device: torch.device, lines: Sequence[Line]) -> None:
        self.dense = DenseMultiplier(device, lines)
        self.expert_forms = kernel_forms(device)
        self._plain = PlainMultiplier()
        self._grouped: dict[type, GroupedMultiplier] = {Int4: GroupedMultiplier(Int4Kernels(device), self.dense, lines)}
        self._multipliers: dict[type, Multiplier] = {Dense: self.dense}  # by type of `Packed`
        if kernels_have_fp8(device):
            self._multipliers[Fp8Channel] = Fp8Multiplier(device, lines)
            self._grouped[Fp8Groups] = GroupedMultiplier(Fp8GroupKernels(), self.dense, lines)
        self._multipliers |= self._grouped

    def multiplies(self, form: Format, outputs: int, inputs: int, dtype: torch.dtype) -> bool:
        """Implement `Operations.multiplies`."""
        if isinstance(form, Fp8ChannelFormat):
            return Fp8Channel in self._multipliers
        if not isinstance(form, Int4Format | Fp8GroupsFormat):
            return True
        multiplier = self._grouped.get(Int4 if isinstance(form, Int4Format) else Fp8Groups)
        return multiplier is not None and multiplier.multiplies(form.group, outputs, inputs, dtype)

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        """Implement `Operations.norm`."""
        return rms_norm(x.contiguous(), norm.weight, norm.eps) if norm.is_whole else norm.normalize(x)

    def norm_linear(self, hidden: Tensor, norm: Norm | None, linear: LinearLayer) -> Tensor:
        """Implement `Operations.norm_linear`."""
        multiplier = self._of(linear)
        if norm is None:
            return multiplier.multiply(hidden, linear.packed, linear.bias)
        product = multiplier.of_normed(hidden, norm, linear.packed, linear.bias)
        if product is not None:
            return product
        return multiplier.multiply(rms_norm(hidden, norm.weight, norm.eps), linear.packed, linear.bias)

    def fold_norm(self, norm: Norm, linear: LinearLayer) -> None:
        """Implement `Operations.fold_norm`."""
        self._of(linear).fold_norm(norm, linear.packed, linear.bias)

    def norm_linear_unscaled(
        self, hidden: Tensor, norm: Norm | None, linear: LinearLayer
    ) -> tuple[Tensor, Unscaled | None]:
        """Implement `Operations.norm_linear_unscaled`."""
        if norm is None or not norm.is_folded or len(hidden) <= MOST_SCALED_ROWS:
            return self.norm_linear(hidden, norm, linear), None
        return self._of(linear).multiply(hidden, linear.packed, linear.bias), Unscaled(hidden, norm.eps)

    def linear_add(self, x: Tensor, linear: LinearLayer, residual: Tensor, after: Norm | None = None) -> Tensor:
        """Implement `Operations.linear_add`."""
        if after is not None:
            norm_add(self._sum(x, linear), after.weight, after.eps, residual)
            return residual
        if linear.is_partial:
            return residual.add_(self._sum(x, linear))
        return self._of(linear).add(x, linear.packed, linear.bias, residual)

    def norm_gated(
        self, hidden: Tensor, norm: Norm | None, gate_up: LinearLayer, activation: Activation = "silu"
    ) -> Tensor:
        """Implement `Operations.norm_gated`."""
        gated = self._gated(hidden, norm, gate_up, activation)
        if gated is not None:
            return gated
        return silu_mul(*self.norm_linear_unscaled(hidden, norm, gate_up), gelu=activation == "gelu_tanh")

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
        gated = self._gated(hidden, norm, gate_up, activation)
        if gated is None:
            is_gelu, multiplier = activation == "gelu_tanh", self._of(down)
            product, unscaled = self.norm_linear_unscaled(hidden, norm, gate_up)
            can_round = after is None and unscaled is None and not down.is_partial
            if can_round and isinstance(multiplier, Fp8Multiplier) and isinstance(down.packed, Fp8Channel):
                total = multiplier.add_gated(product, down.packed, down.bias, residual, is_gelu=is_gelu)
                if total is not None:
                    return total
            gated = silu_mul(product, unscaled, gelu=is_gelu)
        return self.linear_add(gated, down, residual, after)

    def norm_score(self, hidden: Tensor, norm: Norm | None, router: RouterLayer) -> tuple[Tensor, Tensor]:
        """Implement `Operations.norm_score`."""
        return norm_score(hidden, norm, router)

    def experts_add(self, x: Tensor, scores: Tensor, experts: ExpertsLayer, residual: Tensor) -> Tensor:
        """Implement `Operations.experts_add`."""
        return add_experts(x, scores, experts, residual)

    def sigmoid_scaled(self, gated: Tensor, x: Tensor, gate: Tensor) -> Tensor:
        """Implement `Operations.sigmoid_scaled`."""
        scale_by_sigmoid(gated, x, gate)
        return gated

    def sigmoid_gated(self, x: Tensor, gate: Tensor) -> Tensor:
        """Implement `Operations.sigmoid_gated`."""
        sigmoid_gated(x, gate)
        return x

    def norm_silu(self, x: Tensor, norm: Norm, gate: Tensor) -> Tensor:
        """Implement `Operations.norm_silu`."""
        norm_silu(x, norm.weight, norm.eps, gate)
        return x

    def _gated(self, hidden: Tensor, norm: Norm | None, gate_up: LinearLayer, activation: Activation) -> Tensor | None:
        """activation(gate) * up by a product that takes it along; None: there is none of so many rows."""
        assert activation != "clamped_silu", "only experts have it"
        is_gelu = activation == "gelu_tanh"
        return self._of(gate_up).gated(hidden, norm, gate_up.packed, gate_up.bias, is_gelu=is_gelu)

    def _sum(self, x: Tensor, linear: LinearLayer) -> Tensor:
        if not linear.is_partial:
            return self.norm_linear(x, None, linear)
        if type(linear.packed) in self._grouped:
            return linear.total(self._of(linear).multiply(x, linear.packed, None))
        return linear.multiply(x)  # torch multiplies others as they are

    def _of(self, linear: LinearLayer) -> Multiplier:
        return self._multipliers.get(type(linear.packed), self._plain)
