"""The interface of what computes the states of a step's batch."""

from typing import Protocol

from torch import Tensor

from worker_svc.core.kernels.delta.weights import DeltaWeights


class StepStates(Protocol):
    """The states of one step's batch; layers find it in their attention."""

    def recur(self, layer: int, projected: Tensor, weights: DeltaWeights) -> Tensor:
        """Take a step's tokens into the states of `layer`, counted among those that keep one, and read what each
        token's query finds there.

        projected [tokens, queries + keys + values + gates + value_heads + value_heads]: heads one after the other, then
        betas and decays; gates are not used -> [tokens, value_heads * value_dim]
        """
