"""Text rows as columns: what one push adds, for one gateway."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from contract.domain.finish import FinishReason, RequestError, Usage
from contract.domain.plan import U32
from contract.domain.rows import U64, TextRow, TokenLogprob
from detokenizer_svc.core.logprobs import LogprobLog


@dataclass(frozen=True, slots=True)
class SequenceEnd:
    """The end of a sequence."""

    reason: FinishReason
    stop_reason: int | str | None = None  # the stop token id or stop string; None for EOS and whatever is not STOP
    error: RequestError | None = None
    usage: Usage | None = None  # with the request's last sequence


_GOES_ON = SequenceEnd(FinishReason.UNSPECIFIED)


@dataclass(frozen=True, slots=True)
class TextRows:
    """The columns of `contract.domain.rows.TextRow`; row i has the next `counts[i]` of `token_ids`.

    Columns are what makes the hop fast: an object per row would cost as much as everything else together.
    """

    request_ids: list[bytes]  # 16 bytes each
    sequences: U32  # u32[rows]
    token_offsets: U32  # u32[rows]: output tokens of the sequence before the row
    text_offsets: U32  # u32[rows]: characters of the sequence's text before the row
    chains: U64  # u64[rows]: hash of the output tokens before the row
    counts: U32  # u32[rows]
    token_ids: U32  # u32[sum(counts)]
    texts: list[str]
    ends: dict[int, SequenceEnd] = field(default_factory=dict)  # by row
    logprobs: LogprobLog | None = None  # of all tokens above, NaN where none was asked for; None: nobody asked
    prompts: dict[int, int] = field(default_factory=dict)  # by row that begins its sequence: tokens of the prompt
    model_digest: bytes = b""  # 8 bytes: of the model that computed all tokens above; empty: not known

    def __len__(self) -> int:
        return len(self.request_ids)

    def joined(self, after: "TextRows") -> "TextRows":
        """These rows and then others."""
        both, first = (self, after), len(self)
        logprobs = LogprobLog()
        for each in both:
            num_tokens = len(logprobs) + len(each.token_ids)
            if each.logprobs is not None:
                logprobs.copy(each.logprobs, 0, len(each.logprobs))
            logprobs.pad(num_tokens)
        return TextRows(
            request_ids=self.request_ids + after.request_ids,
            sequences=np.concatenate([each.sequences for each in both]),
            token_offsets=np.concatenate([each.token_offsets for each in both]),
            text_offsets=np.concatenate([each.text_offsets for each in both]),
            chains=np.concatenate([each.chains for each in both]),
            counts=np.concatenate([each.counts for each in both]),
            token_ids=np.concatenate([each.token_ids for each in both]),
            texts=self.texts + after.texts,
            ends=self.ends | {first + row: end for row, end in after.ends.items()},
            logprobs=None if self.logprobs is after.logprobs is None else logprobs,
            prompts=self.prompts | {first + row: count for row, count in after.prompts.items()},
        )

    def rows(self) -> Iterator[TextRow]:
        """The rows one by one, for who runs the pipeline in one process."""
        token_ids: list[int] = self.token_ids.tolist()
        start = 0
        for row, (request_id, text) in enumerate(zip(self.request_ids, self.texts, strict=True)):
            stop = start + int(self.counts[row])
            end = self.ends.get(row, _GOES_ON)
            yield TextRow(
                request_id=request_id,
                sequence=int(self.sequences[row]),
                token_offset=int(self.token_offsets[row]),
                text_offset=int(self.text_offsets[row]),
                chain=int(self.chains[row]),
                token_ids=tuple(token_ids[start:stop]),
                text=text,
                logprobs=() if self.logprobs is None else _token_logprobs(self.logprobs, start, token_ids[start:stop]),
                finish=end.reason,
                stop_reason=end.stop_reason,
                error=end.error,
                usage=end.usage,
                num_prompt_tokens=self.prompts.get(row, 0),
                model_digest=self.model_digest,
            )
            start = stop


def _token_logprobs(log: LogprobLog, start: int, token_ids: list[int]) -> tuple[TokenLogprob, ...]:
    logprobs = tuple(log.token(start + i, token_id) for i, token_id in enumerate(token_ids))
    # A request that asked for none has NaN beside those of its neighbours.
    return () if any(math.isnan(entry.logprob) for entry in logprobs) else logprobs


@dataclass(slots=True)
class NewRow:
    """One row on its way into columns."""

    request_id: bytes
    sequence: int
    token_offset: int
    text_offset: int
    chain: int
    token_ids: list[int]
    text: str
    end: SequenceEnd | None = None
    logprobs: LogprobLog | None = None  # of the whole sequence, from its first token on
    num_prompt_tokens: int = 0  # of its request; told if the row begins the sequence


def merge_logprobs(counts: list[int], logs: dict[int, tuple[LogprobLog, int]]) -> LogprobLog:
    """The logprobs of rows with `counts` tokens: by row a sequence's log and where in it the row begins."""
    merged = LogprobLog()
    num_tokens = 0
    for row, count in enumerate(counts):
        if row in logs:
            log, start = logs[row]
            merged.copy(log, start, start + count)
        num_tokens += count
        merged.pad(num_tokens)
    return merged


def text_rows(rows: list[NewRow], model_digest: bytes = b"") -> TextRows:
    """Rows as columns; `model_digest` is of the model that computed all of them."""
    counts = [len(row.token_ids) for row in rows]
    logs = {i: (row.logprobs, row.token_offset) for i, row in enumerate(rows) if row.logprobs is not None}
    return TextRows(
        request_ids=[row.request_id for row in rows],
        sequences=np.array([row.sequence for row in rows], np.uint32),
        token_offsets=np.array([row.token_offset for row in rows], np.uint32),
        text_offsets=np.array([row.text_offset for row in rows], np.uint32),
        chains=np.array([row.chain for row in rows], np.uint64),
        counts=np.array(counts, np.uint32),
        token_ids=np.array([token_id for row in rows for token_id in row.token_ids], np.uint32),
        texts=[row.text for row in rows],
        ends={i: row.end for i, row in enumerate(rows) if row.end is not None},
        logprobs=merge_logprobs(counts, logs) if logs else None,
        prompts={i: row.num_prompt_tokens for i, row in enumerate(rows) if not row.token_offset},
        model_digest=model_digest,
    )
