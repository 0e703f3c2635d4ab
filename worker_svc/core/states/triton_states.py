"""States of a step by own kernels: nothing of the step is asked of the host."""

from torch import Tensor

from worker_svc.core.kernels.delta.convolution import convolve
from worker_svc.core.kernels.delta.rule import decode, recur
from worker_svc.core.kernels.delta.sequences import Sequences
from worker_svc.core.kernels.delta.weights import DeltaWeights
from worker_svc.core.states.slot_states import SlotStates


class DecodedStates:
    """Of a step in which all sequences advance by one token. Implement `StepStates`."""

    def __init__(self, states: SlotStates, slots: Tensor, contexts: Tensor) -> None:
        """`slots` and `contexts`, the tokens that are taken in once the step is done, are i64[rows]."""
        self._states = states
        self._slots = slots
        self._contexts = contexts

    def recur(self, layer: int, projected: Tensor, weights: DeltaWeights) -> Tensor:
        """Implement `StepStates.recur`."""
        states = self._states
        seen, matrices = states.seen[layer], states.matrices[layer]
        rows = {"slots": self._slots, "contexts": self._contexts}
        return decode(projected, weights, states.shape, seen, matrices, **rows)


class ChunkedStates:
    """Of any step. Implement `StepStates`."""

    def __init__(self, states: SlotStates, sequences: Sequences) -> None:
        """`sequences`: whose rows are all of the step."""
        self._states = states
        self._sequences = sequences

    def recur(self, layer: int, projected: Tensor, weights: DeltaWeights) -> Tensor:
        """Implement `StepStates.recur`."""
        states, sequences = self._states, self._sequences
        mixed = convolve(projected, weights.conv, states.seen[layer], sequences)
        return recur(projected, mixed, weights, states.shape, states.matrices[layer], sequences)
