"""Mixture of experts (Shazeer et al., 2017), with an expert that all tokens share (DeepSeekMoE; Dai et al., 2024)."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from worker_svc.core.layers.fusion import Normed, activate, operand
from worker_svc.core.layers.linear import Projection
from worker_svc.core.layers.mlp import GatedMLP
from worker_svc.core.layers.placement import Placement
from worker_svc.core.layers.stacked import StackedLinear, inputs_together
from worker_svc.core.models.spec import ExpertsSpec, RouterSpec

_CUT = 16  # kernels multiply so many inputs at once


class Router:
    """Implement `RouterLayer`; whole on every rank, and stored as floats by whoever quantizes the rest."""

    def __init__(self, placement: Placement, spec: RouterSpec, count: int, hidden_size: int) -> None:
        self.spec = spec
        self.weight = placement.empty(count, hidden_size)
        self.bias = placement.empty(count) if spec.has_bias else None
        self.correction: Tensor | None = None
        placement.want(f"{spec.name}.weight", self.weight, (count, hidden_size))
        if self.bias is not None:
            placement.want(f"{spec.name}.bias", self.bias, (count,))
        if spec.correction is not None:
            self.correction = placement.empty(count, dtype=torch.float32)
            placement.want(spec.correction, self.correction, (count,))


class Experts:
    """sum(weight * down(activation(gate) * up) of each chosen expert) + sigmoid(x @ shared gate) * shared(x).

    Each rank has a part of every expert, so that all are as busy, however tokens are routed.
    """

    def __init__(self, placement: Placement, spec: ExpertsSpec, hidden_size: int) -> None:
        self._group = placement.group
        self._operations = placement.operations
        self.activation = spec.each.activation
        self.router = Router(placement, spec.router, spec.count, hidden_size)
        each = spec.each
        part = placement.columns(each.size, math.lcm(_CUT, inputs_together(placement, spec, each.down)))
        inputs = [Projection(each.gate, each.size, part), Projection(each.up, each.size, part)]
        self.input = StackedLinear(placement, spec, inputs, hidden_size)
        output = Projection(each.down, hidden_size, slice(0, hidden_size))
        self.output = StackedLinear(placement, spec, [output], each.size, part)
        self._shared = GatedMLP(placement, spec.shared, hidden_size) if spec.shared is not None else None
        if self._shared is not None:
            self._shared.output.is_partial = False  # the sum over ranks is taken of all experts together
        self._shared_gate: Tensor | None = None
        if spec.shared_gate is not None:
            self._shared_gate = placement.empty(hidden_size)
            placement.want(f"{spec.shared_gate}.weight", self._shared_gate.unsqueeze(0), (1, hidden_size))

    def prepare(self) -> None:
        """Bring the weights into the form in which they are multiplied; once, when they are there."""
        self.output.prepare()

    def scale_outputs(self, factor: float) -> None:
        """Multiply what comes out by `factor`, once, when the weights are there."""
        self.output.scale_outputs(factor)
        if self._shared is not None:
            self._shared.scale_outputs(factor)

    def __call__(self, x: Tensor | Normed) -> "Mixture":
        """x [tokens, hidden_size] -> like x, computed by whoever adds it."""
        return Mixture(self, *self._operations.norm_score(*operand(x), self.router))

    def add_to(self, residual: Tensor, x: Tensor, scores: Tensor) -> Tensor:
        """residual + this of x, like `residual`, which may be overwritten by it; scores: as `Mixture` has them."""
        total = residual if self._group.rank == 0 else torch.zeros_like(residual)  # it is added once
        total = self._operations.experts_add(x, scores, self, total)
        if self._shared is not None:
            gate, up = self._shared.input(x)
            gated = activate(gate, self._shared.activation) * up
            if self._shared_gate is None:
                total = total + self._shared.output(gated)
            else:
                scaled = self._operations.sigmoid_scaled(gated.compute(), x, self._shared_gate)
                total = total + self._shared.output(scaled)
        return self._group.all_reduce(total)


@dataclass(frozen=True, slots=True, eq=False)
class Mixture:
    """experts(x)."""

    experts: Experts
    x: Tensor  # [tokens, hidden_size]
    scores: Tensor  # f32[parts, tokens, experts], of which the sum counts

    def __radd__(self, residual: Tensor) -> Tensor:
        """residual + this, like `residual`, which may be overwritten by it."""
        return self.experts.add_to(residual, self.x, self.scores)
