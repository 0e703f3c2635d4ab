"""The simulated runner's states: hashes of the tokens that slots have taken in, as those of contexts in the cache, and
after them those that were saved."""

import numpy as np
import numpy.typing as npt

from contract.domain.plan import U32
from worker_svc.core.pretended_cache import U64, powers, terms_of
from worker_svc.core.slots import I64


class PretendedStates:
    """A token that is taken in twice, not at all, or from another sequence changes the hash of a slot, u64[states]."""

    def __init__(self, num_states: int, max_tokens: int) -> None:
        self._weights = powers(max_tokens)
        self._hashes: U64 = np.zeros(num_states, np.uint64)

    def copy(self, sources: I64, targets: I64) -> None:
        """Copy states; all sources are read before a target is written."""
        self._hashes[targets] = self._hashes[sources]

    def take_in(self, slots: I64, positions: I64, token_ids: U32) -> None:
        """Take in tokens at `positions` of `slots`, all [tokens]; a sequence's first finds zero there."""
        self._hashes[slots[positions == 0]] = 0
        np.add.at(self._hashes, slots, terms_of(token_ids) * self._weights[positions])

    def are_foreign(self, slots: I64, hashes: U64) -> npt.NDArray[np.bool_]:
        """The slots whose states are not of the contexts with these hashes: bool[slots]."""
        found: npt.NDArray[np.bool_] = self._hashes[slots] != hashes
        return found
