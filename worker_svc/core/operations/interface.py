"""The operations of a decoder layer, as large as an implementation can fuse them."""

from typing import Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from worker_svc.core.formats.interface import Format, Packed
from worker_svc.core.formats.stacked.choice import Forms
from worker_svc.core.formats.stacked.interface import StackedWeight
from worker_svc.core.kernels.linear.unscaled import Unscaled
from worker_svc.core.models.spec import RouterSpec

# clamped_silu is of experts alone: gates and ups within bounds, of which the ups are one more (gpt-oss).
Activation: TypeAlias = Literal["silu", "gelu_tanh", "clamped_silu"]


class Norm(Protocol):
    """x / rms(x) * weight over the last dimension."""

    weight: Tensor  # [size]
    eps: float
    is_folded: bool  # the weight is in the product after the norm, and ones stand here

    @property
    def is_whole(self) -> bool:
        """The last dimension is not split over ranks."""

    def normalize(self, x: Tensor) -> Tensor:
        """x [..., size] -> like x: by torch."""

    def fold(self, weight: Tensor) -> None:
        """Move the norm's weight into that of the product after it, [outputs, size]."""


class LinearLayer(Protocol):
    """x @ weight.T + bias with this rank's part of the weight."""

    bias: Tensor | None
    is_partial: bool  # the inputs are split over ranks: what comes out is to be summed over them

    @property
    def packed(self) -> Packed:
        """The weight, as it is multiplied."""

    def multiply(self, x: Tensor) -> Tensor:
        """x [tokens, inputs] -> [tokens, outputs], summed if it is partial: by torch."""

    def total(self, part: Tensor) -> Tensor:
        """Products of this rank's inputs alone, without the bias, [tokens, outputs] -> what comes out: for a partial
        layer.
        """


class RouterLayer(Protocol):
    """Scores experts: whole on every rank."""

    spec: RouterSpec
    weight: Tensor  # [experts, hidden_size]
    bias: Tensor | None  # [experts]
    correction: Tensor | None  # f32[experts]


class StackedLayer(Protocol):
    """A linear layer of each expert, this rank's part of it."""

    weight: StackedWeight
    bias: Tensor | None  # [experts, outputs]


class ExpertsLayer(Protocol):
    """A mixture of gated blocks, this rank's part of each."""

    activation: Activation

    @property
    def router(self) -> RouterLayer:
        """The choice of experts for each row."""

    @property
    def input(self) -> StackedLayer:
        """Of each expert, gates, then ups."""

    @property
    def output(self) -> StackedLayer:
        """Of each expert, from what is gated to hidden states."""


class Operations(Protocol):
    """Chosen once from device and dtype. Hidden states and residuals are [tokens, hidden_size]; a norm that is None
    changes nothing.
    """

    @property
    def expert_forms(self) -> Forms:
        """The forms of experts' weights that are multiplied here."""

    def multiplies(self, form: Format, outputs: int, inputs: int, dtype: torch.dtype) -> bool:
        """Return whether a linear layer's weight is multiplied here in this form, and not widened when it is read.

        dtype: of the model.
        """

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        """norm(x) -> like x [tokens, size]."""

    def norm_linear(self, hidden: Tensor, norm: Norm | None, linear: LinearLayer) -> Tensor:
        """linear(norm(hidden)) -> [tokens, outputs]."""

    def fold_norm(self, norm: Norm, linear: LinearLayer) -> None:
        """Prepare `norm_linear_unscaled`, once, where these operations gain by that; the weights are there."""

    def norm_linear_unscaled(
        self, hidden: Tensor, norm: Norm | None, linear: LinearLayer
    ) -> tuple[Tensor, Unscaled | None]:
        """linear(norm(hidden)) -> [tokens, outputs], but for the scales of its rows if they come along."""

    def linear_add(self, x: Tensor, linear: LinearLayer, residual: Tensor, after: Norm | None = None) -> Tensor:
        """residual + after(linear(x)), like `residual`, which may be overwritten by it."""

    def norm_gated(
        self, hidden: Tensor, norm: Norm | None, gate_up: LinearLayer, activation: Activation = "silu"
    ) -> Tensor:
        """activation(gate) * up -> [tokens, outputs / 2]; outputs of `gate_up(norm(hidden))` are gates, then ups."""

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
        """`linear_add` by `down` of what `norm_gated` gives."""

    def norm_score(self, hidden: Tensor, norm: Norm | None, router: RouterLayer) -> tuple[Tensor, Tensor]:
        """norm(hidden), like `hidden` [tokens, hidden_size], and parts whose sum is its scores, f32[parts, tokens,
        experts].
        """

    def experts_add(self, x: Tensor, scores: Tensor, experts: ExpertsLayer, residual: Tensor) -> Tensor:
        """residual + what the experts give that are chosen by `scores` for each row of x, as `norm_score` has both,
        like `residual`, which may be overwritten by it; of several ranks, this one's part of the sum.
        """

    def sigmoid_scaled(self, gated: Tensor, x: Tensor, gate: Tensor) -> Tensor:
        """gated * sigmoid(x @ gate), like `gated` [tokens, size], which may be overwritten; gate [hidden_size]."""

    def sigmoid_gated(self, x: Tensor, gate: Tensor) -> Tensor:
        """x * sigmoid(gate), like x [tokens, size], which may be overwritten."""

    def norm_silu(self, x: Tensor, norm: Norm, gate: Tensor) -> Tensor:
        """norm(x) * silu(gate), like x; the norm is of each run of as many numbers as it has weights."""
