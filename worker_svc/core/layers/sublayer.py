"""A block of a decoder layer and the residual stream around it."""

from torch import Tensor

from worker_svc.core.attention.interface import StepAttention
from worker_svc.core.layers.attention import Attention
from worker_svc.core.layers.mlp import GatedMLP
from worker_svc.core.layers.norm import RMSNorm
from worker_svc.core.layers.placement import Placement
from worker_svc.core.layers.rotary import RotaryEmbedding
from worker_svc.core.models.spec import AttentionSpec, SublayerSpec


class Sublayer:
    """hidden + after(mixer(before(hidden))), without the norms that a family does not have."""

    def __init__(
        self, placement: Placement, spec: SublayerSpec, hidden_size: int, layer: int, rotary: RotaryEmbedding
    ) -> None:
        self._operations = placement.operations
        self._scale = spec.scale
        self._before = RMSNorm(placement, spec.before, hidden_size) if spec.before is not None else None
        self._after = RMSNorm(placement, spec.after, hidden_size) if spec.after is not None else None
        self._mixer: Attention | GatedMLP
        if isinstance(spec.mixer, AttentionSpec):
            self._mixer = Attention(placement, spec.mixer, hidden_size, layer, rotary)
        else:
            self._mixer = GatedMLP(placement, spec.mixer, hidden_size)

    def prepare(self) -> None:
        """Bring the weights into the form in which they are multiplied; once, when they are there."""
        self._mixer.output.scale_outputs(self._scale)
        if self._before is not None:
            self._operations.fold_norm(self._before, self._mixer.input)

    def __call__(self, hidden: Tensor, attention: StepAttention, rows: Tensor | None = None) -> Tensor:
        """hidden [tokens, hidden_size] -> like hidden; if it attends, of `rows` i64[n] alone where these are given."""
        x = self._before(hidden) if self._before is not None else hidden
        if isinstance(self._mixer, Attention):
            mixed = self._mixer(x, attention, rows)
            hidden = hidden if rows is None else hidden[rows]
        else:
            mixed = self._mixer(x)
        return hidden + (self._after(mixed) if self._after is not None else mixed)
