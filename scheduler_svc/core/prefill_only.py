"""The ration of steps with prompts only; see `prefilling`.

Each such step, or run of steps, makes one gap between tokens longer of each sequence that decodes. The gap that
ninety-nine of a hundred do not exceed stays, since such gaps are rarer.
"""

from dataclasses import dataclass

_SHARE = 1 / 128  # of a worker's steps may be such in the long run
_MOST_SAVED = 9.0  # such steps that may follow closely on each other after a time without


@dataclass(slots=True)
class PrefillOnly:
    """What one worker has left of it."""

    saved: float = _MOST_SAVED  # steps that may be such
    num_in_a_row: int = 0

    def may_go_on(self, most_in_a_row: int) -> bool:
        """Return whether the next step may be such, of which no more than so many follow each other."""
        return self.saved >= 1 and self.num_in_a_row < most_in_a_row

    def count(self, *, is_prefill_only: bool) -> None:
        """A step was planned."""
        self.num_in_a_row = self.num_in_a_row + 1 if is_prefill_only else 0
        self.saved = self.saved - 1 if is_prefill_only else min(_MOST_SAVED, self.saved + _SHARE)
