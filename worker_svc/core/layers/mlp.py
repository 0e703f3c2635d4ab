"""The gated feed-forward block (SwiGLU, GEGLU; Shazeer, 2020)."""

from torch import Tensor

from worker_svc.core.layers.fusion import Normed, Product, activate
from worker_svc.core.layers.linear import Linear, Projection
from worker_svc.core.layers.placement import Placement
from worker_svc.core.models.spec import GatedMLPSpec


class GatedMLP:
    """down(activation(gate) * up); gate and up are one product."""

    def __init__(self, placement: Placement, spec: GatedMLPSpec, hidden_size: int) -> None:
        self.activation = spec.activation
        part = gated_columns(placement, spec)
        projections = [Projection(spec.gate, spec.size, part), Projection(spec.up, spec.size, part)]
        self.input = Linear(placement, projections, hidden_size, has_bias=spec.has_bias)
        output = Projection(spec.down, hidden_size, slice(0, hidden_size))
        self.output = Linear(placement, [output], spec.size, part, has_bias=spec.has_bias)

    def __call__(self, x: Tensor | Normed) -> Product:
        """x [tokens, hidden_size] -> like x."""
        gate, up = self.input(x)
        return self.output(activate(gate, self.activation) * up)

    def prepare(self) -> None:
        """Nothing is to be done once the weights are there."""

    def scale_outputs(self, factor: float) -> None:
        """Multiply what comes out by `factor`, once, when the weights are there."""
        self.output.scale_outputs(factor)


def gated_columns(placement: Placement, spec: GatedMLPSpec) -> slice:
    """This rank's part of what is between the two products."""
    return placement.columns(spec.size)
