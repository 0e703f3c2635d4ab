"""Logprobs of a run of tokens, growing."""

from array import array

import numpy as np

from penstock.domain.plan import Logprobs
from penstock.domain.rows import TokenLogprob


class LogprobLog:
    """Columns of `penstock.domain.plan.Logprobs`, token by token; NaN where none was asked for."""

    __slots__ = ("_sampled", "_top_ends", "_top_ids", "_top_logprobs")

    def __init__(self) -> None:
        self._sampled = array("f")
        self._top_ends = array("I", (0,))  # where the alternatives of each token end
        self._top_ids = array("I")
        self._top_logprobs = array("f")

    def __len__(self) -> int:
        return len(self._sampled)

    def append(self, sampled: float, top_ids: list[int], top_logprobs: list[float]) -> None:
        """Adds one token: natural logs, alternatives the most likely first."""
        self._sampled.append(sampled)
        self._top_ids.extend(top_ids)
        self._top_logprobs.extend(top_logprobs)
        self._top_ends.append(len(self._top_ids))

    def pad(self, num_tokens: int) -> None:
        """Adds tokens that nobody asked logprobs of, until there are `num_tokens`."""
        missing = num_tokens - len(self)
        self._sampled.extend([float("nan")] * missing)
        self._top_ends.extend([self._top_ends[-1]] * missing)

    def copy(self, source: "LogprobLog", start: int, stop: int) -> None:
        """Adds tokens `start` to `stop` of another log."""
        for token in range(start, stop):
            low, high = source._top_ends[token], source._top_ends[token + 1]
            self.append(
                source._sampled[token], source._top_ids[low:high].tolist(), source._top_logprobs[low:high].tolist()
            )

    def columns(self) -> Logprobs:
        """All of it as columns."""
        return Logprobs(
            sampled=np.array(self._sampled, np.float32),
            top_counts=np.diff(np.array(self._top_ends, np.uint32)).astype(np.uint32),
            top_ids=np.array(self._top_ids, np.uint32),
            top_logprobs=np.array(self._top_logprobs, np.float32),
        )

    def token(self, index: int, token_id: int) -> TokenLogprob:
        """The logprob of one token."""
        low, high = self._top_ends[index], self._top_ends[index + 1]
        top = tuple(zip(self._top_ids[low:high], self._top_logprobs[low:high], strict=True))
        return TokenLogprob(token_id, self._sampled[index], top)


class RowLogprobs:
    """The logprobs of one batch of rows, read token by token."""

    __slots__ = ("_logprobs", "_top_ends")

    def __init__(self, logprobs: Logprobs) -> None:
        self._logprobs = logprobs
        self._top_ends = [0, *np.cumsum(logprobs.top_counts).tolist()]

    def add_to(self, log: LogprobLog, token: int) -> None:
        """Adds token `token` of the batch to a log."""
        low, high = self._top_ends[token], self._top_ends[token + 1]
        log.append(
            float(self._logprobs.sampled[token]),
            self._logprobs.top_ids[low:high].tolist(),
            self._logprobs.top_logprobs[low:high].tolist(),
        )
