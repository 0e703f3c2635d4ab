"""The gated feed-forward block (SwiGLU; Shazeer, 2020)."""

import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from worker_svc.core.config import ModelConfig
from worker_svc.core.layers.linear import ColumnParallelLinear, RowParallelLinear
from worker_svc.core.layers.placement import Placement


class GatedMLP:
    """down(silu(gate(x)) * up(x)); gate and up are one product."""

    def __init__(self, placement: Placement, name: str, config: ModelConfig) -> None:
        size = config.intermediate_size
        part = placement.part(size, "intermediate_size")
        self._gate_up = ColumnParallelLinear(
            placement,
            config.hidden_size,
            [(f"{name}.gate_proj", size, part), (f"{name}.up_proj", size, part)],
            bias=config.mlp_bias,
        )
        self._down = RowParallelLinear(
            placement, f"{name}.down_proj", size, part, config.hidden_size, bias=config.mlp_bias
        )

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, hidden_size] -> like x, whole on every rank."""
        gate, up = self._gate_up(x).chunk(2, dim=-1)
        return self._down(F.silu(gate) * up)
