"""The gated feed-forward block (SwiGLU; Shazeer, 2020)."""

from torch import Tensor

from worker_svc.core.config import ModelConfig
from worker_svc.core.layers.linear import ColumnParallelLinear, RowParallelLinear
from worker_svc.core.layers.norm import RMSNorm
from worker_svc.core.layers.placement import Placement


class GatedMLP:
    """x + down(silu(gate(norm(x))) * up(norm(x))); gate and up are one product."""

    def __init__(self, placement: Placement, name: str, norm_name: str, config: ModelConfig) -> None:
        size = config.intermediate_size
        part = placement.part(size, "intermediate_size")
        self._operations = placement.operations
        self._norm = RMSNorm(placement, norm_name, config.hidden_size, config.rms_norm_eps)
        self._gate_up = ColumnParallelLinear(
            placement,
            config.hidden_size,
            [(f"{name}.gate_proj", size, part), (f"{name}.up_proj", size, part)],
            bias=config.mlp_bias,
        )
        self._down = RowParallelLinear(
            placement, f"{name}.down_proj", size, part, config.hidden_size, bias=config.mlp_bias
        )

    def fold_norm(self) -> None:
        """See `Operations.fold_norm`."""
        self._operations.fold_norm(self._norm, self._gate_up)

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [tokens, hidden_size] -> like hidden, whole on every rank."""
        gated = self._operations.norm_gated(hidden, self._norm, self._gate_up)
        return self._operations.linear_add(gated, self._down, hidden)
