"""Pinned memory in which the host writes what the next recorded step is about. The step reads it by itself: nothing is
copied or launched before it.
"""

import torch

from worker_svc.core.slots import I64

_STEPS = 8  # that may be on their way at once; a further one waits


class Staging:
    """Memory for the last few steps in turn: step i, of all that were launched, reads row i modulo their number.

    words     i64[steps, words], pinned
    turn      i64[1] on the device: steps that have read their row; each adds one
    num_done  i64[1], pinned: the same, for the host
    """

    def __init__(self, device: torch.device, num_words: int) -> None:
        is_pinned = device.type == "cuda"
        self.words = torch.zeros(_STEPS, num_words, dtype=torch.int64, pin_memory=is_pinned)
        self.turn = torch.zeros(1, dtype=torch.int64, device=device)
        self.num_done = torch.zeros(1, dtype=torch.int64, pin_memory=is_pinned)
        self._rows: list[I64] = list(self.words.numpy())
        self._done: I64 = self.num_done.numpy()
        self._num_launched = 0

    def next(self) -> I64:
        """The row of the next step, to be filled before it is launched."""
        if self._num_launched - int(self._done[0]) >= _STEPS:
            torch.cuda.synchronize()
        return self._rows[self._num_launched % _STEPS]

    def launched(self) -> None:
        """The step is on its way."""
        self._num_launched += 1
