"""The gated delta rule (Yang et al., "Gated Delta Networks", 2024): a state of fixed size, no keys and values."""

import torch
from torch import Tensor

from worker_svc.core.attention.interface import StepAttention
from worker_svc.core.kernels.delta.weights import DeltaWeights
from worker_svc.core.layers.fusion import Normed, Product, operand
from worker_svc.core.layers.linear import Linear, Projection
from worker_svc.core.layers.norm import RMSNorm
from worker_svc.core.layers.placement import Placement
from worker_svc.core.models.spec import DeltaRuleSpec
from worker_svc.core.states.slot_states import StateShape


class DeltaRule:
    """o(norm(read(q, k, v)) * silu(gate)); all that comes in is one product, of this rank's heads."""

    def __init__(self, placement: Placement, spec: DeltaRuleSpec, hidden_size: int, state: int) -> None:
        """`state`: the number of the layer among those that keep one."""
        keys, values = delta_rule_heads(placement, spec)
        num_keys, num_values = spec.num_key_heads * spec.key_dim, spec.num_value_heads * spec.value_dim
        of_keys = slice(keys.start * spec.key_dim, keys.stop * spec.key_dim)
        of_values = slice(values.start * spec.value_dim, values.stop * spec.value_dim)
        self._state = state
        self._operations = placement.operations
        self.input = Linear(
            placement,
            [
                Projection(spec.query, num_keys, of_keys),
                Projection(spec.key, num_keys, of_keys),
                Projection(spec.value, num_values, of_values),
                Projection(spec.gate, num_values, of_values),
                Projection(spec.beta, spec.num_value_heads, values),
                Projection(spec.decay, spec.num_value_heads, values),
            ],
            hidden_size,
        )
        self._gates = slice(sum(self.input.sizes[:3]), sum(self.input.sizes[:4]))
        self._weights = DeltaWeights(
            conv=placement.empty(self._gates.start, spec.conv_width),
            decay_rate=placement.empty(values.stop - values.start, dtype=torch.float32),
            decay_bias=placement.empty(values.stop - values.start, dtype=torch.float32),
        )
        here = 0
        for first, part in ((0, of_keys), (num_keys, of_keys), (2 * num_keys, of_values)):
            mine = slice(first + part.start, first + part.stop)
            room = self._weights.conv[here : here + mine.stop - mine.start].unsqueeze(1)
            placement.want(f"{spec.conv}.weight", room, (spec.num_channels, 1, spec.conv_width), mine)
            here += mine.stop - mine.start
        placement.want(spec.decay_rate, self._weights.decay_rate, (spec.num_value_heads,), values)
        placement.want(spec.decay_bias, self._weights.decay_bias, (spec.num_value_heads,), values)
        self._norm = RMSNorm(placement, spec.norm, spec.value_dim, is_of_head=True)
        output = Projection(spec.output, hidden_size, slice(0, hidden_size))
        self.output = Linear(placement, [output], num_values, of_values)

    def prepare(self) -> None:
        """Bring the weights into the form in which they are multiplied, once, when they are there."""
        self.input.prepare()
        self._norm.prepare()
        self._weights.decay_rate.exp_().neg_()

    def scale_outputs(self, factor: float) -> None:
        """Multiply what comes out by `factor`, once, when the weights are there."""
        self.output.scale_outputs(factor)

    def __call__(self, x: Tensor | Normed, attention: StepAttention, rows: Tensor | None = None) -> Product:
        """x [tokens, hidden_size] -> like x, or of `rows` i64[n] alone; states take in all tokens."""
        states = attention.states
        assert states is not None, "a model with the delta rule has states"
        projected = self._operations.norm_linear(*operand(x), self.input)
        read, gates = states.recur(self._state, projected, self._weights), projected[:, self._gates]
        if rows is not None:
            read, gates = read[rows], gates[rows]
        return self.output(self._operations.norm_silu(read, self._norm, gates))


def delta_rule_heads(placement: Placement, spec: DeltaRuleSpec) -> tuple[slice, slice]:
    """This rank's key heads, and the value heads that are theirs."""
    keys = placement.part(spec.num_key_heads, "linear_num_key_heads")
    values_each = spec.num_value_heads // spec.num_key_heads
    return keys, slice(keys.start * values_each, keys.stop * values_each)


def delta_rule_state(placement: Placement, specs: tuple[DeltaRuleSpec, ...]) -> StateShape | None:
    """This rank's part of the state of all layers that keep one; None: there are none."""
    if not specs:
        return None
    keys, values = delta_rule_heads(placement, specs[0])
    return StateShape(
        num_layers=len(specs),
        num_key_heads=keys.stop - keys.start,
        num_value_heads=values.stop - values.start,
        key_dim=specs[0].key_dim,
        value_dim=specs[0].value_dim,
        conv_width=specs[0].conv_width,
        dtype=placement.dtype,
    )
