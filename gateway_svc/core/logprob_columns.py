"""Logprobs as they come, columns of packed little-endian values, read token by token."""

import math
from collections.abc import Sequence

import numpy as np

from contract.domain.rows import TokenLogprob


class LogprobColumns:
    """The logprobs of a run of tokens; the columns are those of `penstock.v1.LogprobColumns`."""

    def __init__(
        self,
        num_tokens: int,
        *,
        sampled: bytes,
        ranks: bytes,
        top_counts: bytes,
        top_ids: bytes,
        top_logprobs: bytes,
        byte_counts: bytes,
        token_bytes: bytes,
        text_offsets: bytes,
    ) -> None:
        """Checks that the columns fit together.

        Raises:
            ValueError: they do not, or are not for so many tokens.
        """
        self._sampled: list[float] = np.frombuffer(sampled, "<f4").tolist()
        self._ranks: list[int] = np.frombuffer(ranks, "<u4").tolist()
        counts = np.frombuffer(top_counts, "<u4")
        self._ends: list[int] = [0, *np.cumsum(counts).tolist()]
        self._top_ids: list[int] = np.frombuffer(top_ids, "<u4").tolist()
        self._top_logprobs: list[float] = np.frombuffer(top_logprobs, "<f4").tolist()
        num_bytes = np.frombuffer(byte_counts, "<u4")
        self._byte_ends: list[int] = [0, *np.cumsum(num_bytes).tolist()]
        self._bytes = token_bytes
        self._text_offsets: list[int] = np.frombuffer(text_offsets, "<u4").tolist()
        num_top = self._ends[-1]
        lengths = (
            *(len(self._sampled), len(self._ranks), len(counts), len(self._text_offsets)),
            *(len(self._top_ids), len(self._top_logprobs), len(num_bytes)),
        )
        if lengths != (*(num_tokens,) * 4, num_top, num_top, num_tokens + num_top):
            raise ValueError(f"logprob columns of {lengths} values for {num_tokens} tokens")
        if self._byte_ends[-1] != len(self._bytes):
            raise ValueError(f"{len(self._bytes)} bytes of tokens where {self._byte_ends[-1]} were counted")

    def tokens(self, start: int, token_ids: Sequence[int]) -> tuple[TokenLogprob, ...]:
        """Logprobs of the tokens from `start` on; none if the request asked for none.

        A token that was restored after the server lost it has NaN if no gateway could tell its logprob.
        """
        if not token_ids or all(map(math.isnan, self._sampled[start : start + len(token_ids)])):
            return ()
        return tuple(self._token(start + i, token_id) for i, token_id in enumerate(token_ids))

    def _token(self, token: int, token_id: int) -> TokenLogprob:
        first, last = self._ends[token], self._ends[token + 1]
        num_tokens = len(self._sampled)
        return TokenLogprob(
            token_id=token_id,
            logprob=self._sampled[token],
            rank=self._ranks[token],
            top=tuple(zip(self._top_ids[first:last], self._top_logprobs[first:last], strict=True)),
            token_bytes=self._piece(token),
            top_bytes=tuple(self._piece(num_tokens + index) for index in range(first, last)),
            text_offset=self._text_offsets[token],
        )

    def _piece(self, index: int) -> bytes:
        return self._bytes[self._byte_ends[index] : self._byte_ends[index + 1]]
