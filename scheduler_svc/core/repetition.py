"""Finds out that an output repeats itself: the same work for every token, however long the pattern is."""

from collections.abc import Iterable

import numpy as np

from contract.domain.repetition import RepetitionDetectionParams


class RepetitionDetector:
    """One sequence's: a function of its output."""

    __slots__ = ("_latest", "_lengths", "_needed", "_place", "_size", "has_found")

    def __init__(self, params: RepetitionDetectionParams, token_ids: Iterable[int] = ()) -> None:
        """`token_ids`: the output so far."""
        self._size = size = params.max_pattern_size
        sizes = np.arange(size, 0, -1)  # of patterns, the longest first, as the tokens of `_latest` come
        self._needed = np.where(sizes < params.min_pattern_size, np.inf, sizes * (params.min_count - 1))
        self._lengths = np.zeros(size, np.int64)  # i64[size]: tokens in a row, each equal to that one pattern before it
        # The last `size` tokens, written twice so that they stand in a row wherever the oldest is.
        self._latest = np.full(2 * size, -1, np.int64)
        self._place = 0  # of the oldest
        self.has_found = False  # the output ends with a pattern as often as it may not
        for token_id in token_ids:
            self.add(token_id)

    def add(self, token_id: int) -> bool:
        """Take the next token; return `has_found`."""
        place, size = self._place, self._size
        self._lengths += 1
        self._lengths[self._latest[place : place + size] != token_id] = 0
        self._latest[place] = self._latest[place + size] = token_id
        self._place = (place + 1) % size
        self.has_found = bool((self._lengths >= self._needed).any())
        return self.has_found
