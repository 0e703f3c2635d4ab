"""A block of a decoder layer and the residual stream around it."""

from typing import TypeAlias

from torch import Tensor

from worker_svc.core.attention.interface import StepAttention
from worker_svc.core.layers.attention import Attention
from worker_svc.core.layers.delta_rule import DeltaRule
from worker_svc.core.layers.experts import Experts, Mixture
from worker_svc.core.layers.fusion import Normed, Product
from worker_svc.core.layers.latent_attention import LatentAttention
from worker_svc.core.layers.mlp import GatedMLP
from worker_svc.core.layers.norm import RMSNorm, make_norm
from worker_svc.core.layers.placement import Placement
from worker_svc.core.layers.rotary import RotaryEmbedding
from worker_svc.core.models.spec import (
    AttentionSpec,
    DeltaRuleSpec,
    ExpertsSpec,
    LatentAttentionSpec,
    Mixer,
    SublayerSpec,
)

# Those that look at tokens before: the others need only the rows that are wanted.
TokenMixer: TypeAlias = Attention | LatentAttention | DeltaRule


class Sublayer:
    """hidden + after(mixer(before(hidden))), without the norms that a family does not have."""

    def __init__(
        self, placement: Placement, spec: SublayerSpec, hidden_size: int, layer: int, rotary: RotaryEmbedding | None
    ) -> None:
        """`layer` counts those of its sort: with keys and values, which have `rotary`, or with a state."""
        assert spec.after is None or len(spec.mixers) == 1, "what several blocks give is not normalised"
        has_experts = any(isinstance(mixer, ExpertsSpec) for mixer in spec.mixers)
        assert spec.before is not None or not has_experts, "experts add to what they do not read"
        self._operations = placement.operations
        self._scale = spec.scale
        self._before = make_norm(placement, spec.before, hidden_size) if spec.before is not None else None
        self._after = RMSNorm(placement, spec.after, hidden_size) if spec.after is not None else None

        def make_mixer(mixer: Mixer) -> TokenMixer | GatedMLP | Experts:
            if isinstance(mixer, DeltaRuleSpec):
                return DeltaRule(placement, mixer, hidden_size, layer)
            if isinstance(mixer, AttentionSpec):
                assert rotary is not None, "a layer that attends has a rotation"
                return Attention(placement, mixer, hidden_size, layer, rotary)
            if isinstance(mixer, LatentAttentionSpec):
                return LatentAttention(placement, mixer, hidden_size, layer)
            if isinstance(mixer, ExpertsSpec):
                return Experts(placement, mixer, hidden_size)
            return GatedMLP(placement, mixer, hidden_size)

        self._mixers = [make_mixer(mixer) for mixer in spec.mixers]

    def prepare(self) -> None:
        """Bring the weights into the form in which they are multiplied; once, when they are there."""
        for norm in (self._before, self._after):
            if norm is not None:
                norm.prepare()
        for mixer in self._mixers:
            mixer.prepare()
            mixer.scale_outputs(self._scale)
        [*others, mixer] = self._mixers
        # Experts' inputs are read by several products: by a router, too.
        if isinstance(self._before, RMSNorm) and not others and not isinstance(mixer, Experts):
            self._operations.fold_norm(self._before, mixer.input)

    def __call__(self, hidden: Tensor, attention: StepAttention, rows: Tensor | None = None) -> Tensor:
        """hidden [tokens, hidden_size] -> like hidden; where `rows` i64[n] are given, of these alone if it looks at
        other tokens.
        """
        x: Tensor | Normed = self._before(hidden) if self._before is not None else hidden
        if isinstance(x, Normed) and len(self._mixers) > 1:
            x = self._operations.norm(x.hidden, x.norm)  # before the first mixer's output is added to its hidden states
        mixes = any(isinstance(mixer, TokenMixer) for mixer in self._mixers)
        if rows is not None and mixes:
            hidden = hidden[rows]
        for mixer in self._mixers:
            if isinstance(mixer, TokenMixer):
                mixed: Product | Mixture = mixer(x, attention, rows)
            else:
                mixed = mixer(x[rows] if rows is not None and mixes and isinstance(x, Tensor) else x)
            hidden = hidden + self._normed(mixed)
        return hidden

    def _normed(self, mixed: Product | Mixture) -> Product | Mixture:
        if self._after is None:
            return mixed
        assert isinstance(mixed, Product), "a sum of experts is not normalised"
        return self._after(mixed)
