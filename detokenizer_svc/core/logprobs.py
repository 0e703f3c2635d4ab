"""Logprobs of a run of tokens, growing."""

import math
from array import array
from collections.abc import Callable, Sequence

import numpy as np

from contract.domain.plan import U32, Logprobs
from contract.domain.rows import TokenLogprob

Top = Sequence[tuple[int, float, bytes]]  # alternatives of a token: id, natural log, bytes

_NAN = float("nan")


class LogprobLog:
    """The columns of `contract.domain.plan.Logprobs` and the bytes of the tokens; NaN where none was asked for."""

    __slots__ = (
        *("_ranks", "_sampled", "_sampled_bytes", "_text_offsets"),
        *("_top_bytes", "_top_ends", "_top_ids", "_top_logprobs"),
    )

    def __init__(self) -> None:
        self._sampled = array("f")
        self._ranks = array("I")
        self._sampled_bytes: list[bytes] = []
        self._text_offsets = array("I")  # characters of text that are complete before each token
        self._top_ends = array("I", (0,))  # where the alternatives of each token end
        self._top_ids = array("I")
        self._top_logprobs = array("f")
        self._top_bytes: list[bytes] = []

    def __len__(self) -> int:
        return len(self._sampled)

    def append(self, sampled: float, rank: int, sampled_bytes: bytes, top: Top = (), text_offset: int = 0) -> None:
        """Adds one token: natural logs, alternatives (id, logprob, bytes) the most likely first; characters before."""
        self._sampled.append(sampled)
        self._ranks.append(rank)
        self._sampled_bytes.append(sampled_bytes)
        self._text_offsets.append(text_offset)
        for token_id, logprob, token_bytes in top:
            self._top_ids.append(token_id)
            self._top_logprobs.append(logprob)
            self._top_bytes.append(token_bytes)
        self._top_ends.append(len(self._top_ids))

    def pad(self, num_tokens: int) -> None:
        """Adds tokens that nobody asked logprobs of, until there are `num_tokens`."""
        while len(self) < num_tokens:
            self.append(_NAN, 0, b"")

    def copy(self, source: "LogprobLog", start: int, stop: int) -> None:
        """Adds tokens `start` to `stop` of another log."""
        first, last = source._top_ends[start], source._top_ends[stop]
        moved = len(self._top_ids) - first
        self._sampled += source._sampled[start:stop]
        self._ranks += source._ranks[start:stop]
        self._sampled_bytes += source._sampled_bytes[start:stop]
        self._text_offsets += source._text_offsets[start:stop]
        self._top_ids += source._top_ids[first:last]
        self._top_logprobs += source._top_logprobs[first:last]
        self._top_bytes += source._top_bytes[first:last]
        self._top_ends.extend(end + moved for end in source._top_ends[start + 1 : stop + 1])

    def columns(self) -> Logprobs:
        """All of it as columns."""
        return Logprobs(
            sampled=np.array(self._sampled, np.float32),
            ranks=np.array(self._ranks, np.uint32),
            top_counts=np.diff(np.array(self._top_ends, np.uint32)).astype(np.uint32),
            top_ids=np.array(self._top_ids, np.uint32),
            top_logprobs=np.array(self._top_logprobs, np.float32),
        )

    def token_bytes(self) -> list[bytes]:
        """The bytes of every sampled token, then those of every alternative."""
        return self._sampled_bytes + self._top_bytes

    def text_offsets(self) -> U32:
        """u32[tokens]: characters of the sequence's text that are complete before each."""
        return np.array(self._text_offsets, np.uint32)

    def token(self, index: int, token_id: int) -> TokenLogprob:
        """The logprob of one token."""
        top = self._top(index)
        return TokenLogprob(
            token_id=token_id,
            logprob=self._sampled[index],
            rank=self._ranks[index],
            top=tuple((i, logprob) for i, logprob, _ in top),
            token_bytes=self._sampled_bytes[index],
            top_bytes=tuple(token_bytes for _, _, token_bytes in top),
            text_offset=self._text_offsets[index],
        )

    def _top(self, token: int) -> Top:
        entries = slice(self._top_ends[token], self._top_ends[token + 1])
        return list(zip(self._top_ids[entries], self._top_logprobs[entries], self._top_bytes[entries], strict=True))


class RowLogprobs:
    """The logprobs of one batch of rows, read token by token.

    Args:
        logprobs: of all tokens of the batch.
        token_bytes: what a token stands for.
    """

    __slots__ = ("_logprobs", "_token_bytes", "_top_ends")

    def __init__(self, logprobs: Logprobs, token_bytes: Callable[[int], bytes]) -> None:
        self._logprobs = logprobs
        self._token_bytes = token_bytes
        self._top_ends = [0, *np.cumsum(logprobs.top_counts).tolist()]

    def add_to(self, log: LogprobLog, token: int, token_id: int, text_offset: int) -> None:
        """Adds token `token` of the batch, which is `token_id` and has so many characters before it, to a log."""
        sampled = float(self._logprobs.sampled[token])
        if math.isnan(sampled):
            log.pad(len(log) + 1)
            return
        entries = slice(self._top_ends[token], self._top_ends[token + 1])
        top_ids = self._logprobs.top_ids[entries].tolist()
        top_logprobs = self._logprobs.top_logprobs[entries].tolist()
        log.append(
            sampled,
            int(self._logprobs.ranks[token]),
            self._token_bytes(token_id),
            [(i, logprob, self._token_bytes(i)) for i, logprob in zip(top_ids, top_logprobs, strict=True)],
            text_offset,
        )
