"""Figures of the detokenizer."""

from dataclasses import dataclass


@dataclass(slots=True)
class DetokenizerStats:
    """Counts since the start."""

    num_tokens: int = 0  # added to sequences
    num_duplicate_rows: int = 0  # brought nothing new
    num_gap_rows: int = 0  # began after what is known
    num_mismatched_rows: int = 0  # of another history
    num_ended_rows: int = 0  # after a sequence's end
    num_unknown_rows: int = 0  # of a request that was never opened here
