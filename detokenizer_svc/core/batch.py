"""A batch of the log while it is read, and which of its rows a route gets."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from contract.domain import chain
from contract.domain.plan import U32
from contract.domain.rows import TokenRows
from detokenizer_svc.core.logprobs import LogprobLog, RowLogprobs
from detokenizer_svc.core.textrows import NewRow, SequenceEnd, TextRows, merge_logprobs, text_rows

_SEVERAL = -1  # no token id: the row has none or several, or an end


class LogBatch:
    """Rows of the log with what reading them needs.

    Args:
        rows: the batch.
        logprobs: reader of its logprobs; None: it has none.
    """

    def __init__(self, rows: TokenRows, logprobs: RowLogprobs | None) -> None:
        self.rows = rows
        self.logprobs = logprobs
        # Steps of plain decoding have one token a row and no ends.
        self.is_plain = len(rows.token_ids) == len(rows) and not rows.finishes.any() and bool((rows.counts == 1).all())

    @cached_property
    def starts(self) -> list[int]:
        """The offsets at which each row's tokens begin, and after the last one their number."""
        return [0, *np.cumsum(self.rows.counts, dtype=np.int64).tolist()]

    @cached_property
    def finishes(self) -> list[int]:
        """By row."""
        finishes: list[int] = self.rows.finishes.tolist()
        return finishes

    @cached_property
    def _token_ids(self) -> list[int]:
        token_ids: list[int] = self.rows.token_ids.tolist()
        return token_ids

    def columns(self) -> tuple[list[int], list[int]]:
        """By row: the token of a row that has one and no end, else no valid id; and the hash chain after it."""
        rows = self.rows
        if self.is_plain:
            return rows.token_ids.tolist(), chain.extend_columns(rows.chains, rows.token_ids).tolist()
        single = (rows.counts == 1) & (rows.finishes == 0)
        firsts = rows.token_ids[np.array(self.starts[:-1], np.int64)[single]]
        tokens = np.full(len(rows), _SEVERAL, np.int64)
        tokens[single] = firsts
        chains = np.zeros(len(rows), np.uint64)
        chains[single] = chain.extend_columns(rows.chains[single], firsts)
        return tokens.tolist(), chains.tolist()

    def first_rows(self) -> list[int]:
        """The rows that begin their sequences."""
        positions = self.rows.positions
        first: list[int] = [] if positions.all() else np.flatnonzero(positions == 0).tolist()
        return first

    def tokens(self, row: int) -> list[int]:
        """The token ids of one row."""
        return self._token_ids[self.starts[row] : self.starts[row + 1]]


@dataclass(slots=True)
class RowSelection:
    """The rows that one route gets. As most are taken as the log has them, their columns are the log's."""

    rows: list[int] = field(default_factory=list)  # indices into the batch, ascending
    texts: list[str] = field(default_factory=list)
    text_offsets: list[int] = field(default_factory=list)
    # By place in `rows`:
    ends: dict[int, SequenceEnd] = field(default_factory=dict)
    logprobs: dict[int, tuple[LogprobLog, int]] = field(default_factory=dict)  # a sequence's, and its first new token
    cut: dict[int, NewRow] = field(default_factory=dict)  # rows of which only a part was taken

    def add(self, row: int, new: NewRow, *, whole: bool) -> None:
        """Adds a row; `whole`: its tokens are all of the log's row."""
        place = len(self.rows)
        self.rows.append(row)
        self.texts.append(new.text)
        self.text_offsets.append(new.text_offset)
        if not whole:
            self.cut[place] = new
        if new.end is not None:
            self.ends[place] = new.end
        if new.logprobs is not None:
            self.logprobs[place] = (new.logprobs, new.token_offset)

    def end(self, row: int, text: str, text_offset: int, end: SequenceEnd) -> None:
        """Adds a row that ends its sequence, all of whose tokens were taken."""
        self.ends[len(self.rows)] = end
        self.rows.append(row)
        self.texts.append(text)
        self.text_offsets.append(text_offset)

    def text_rows(self, batch: LogBatch, prompts: Mapping[int, int]) -> TextRows:
        """The columns; `prompts` are the tokens of the prompts of the batch's rows that begin their sequences."""
        if self.cut:
            return text_rows(
                [self.cut.get(place) or self._row(batch, place, prompts) for place in range(len(self.rows))],
                batch.rows.model_digest,
            )
        rows = batch.rows
        if len(self.rows) == len(rows):
            request_ids, sequences, positions = rows.request_ids, rows.sequences, rows.positions
            chains, counts, token_ids = rows.chains, rows.counts, rows.token_ids
        else:
            taken = np.array(self.rows, np.int64)
            request_ids = [rows.request_ids[row] for row in self.rows]
            sequences, positions = rows.sequences[taken], rows.positions[taken]
            chains, counts = rows.chains[taken], rows.counts[taken]
            token_ids = rows.token_ids[taken] if batch.is_plain else self._gather(batch)
        return TextRows(
            request_ids=request_ids,
            sequences=sequences,
            token_offsets=positions,
            text_offsets=np.array(self.text_offsets, np.uint32),
            chains=chains,
            counts=counts,
            token_ids=token_ids,
            texts=self.texts,
            ends=self.ends,
            logprobs=merge_logprobs(counts.tolist(), self.logprobs) if self.logprobs else None,
            prompts={place: prompts[row] for place, row in enumerate(self.rows) if row in prompts} if prompts else {},
            model_digest=rows.model_digest,
        )

    def _gather(self, batch: LogBatch) -> U32:
        starts = batch.starts
        return np.concatenate([batch.rows.token_ids[starts[row] : starts[row + 1]] for row in self.rows])

    def _row(self, batch: LogBatch, place: int, prompts: Mapping[int, int]) -> NewRow:
        row = self.rows[place]
        logprobs = self.logprobs.get(place)
        return NewRow(
            request_id=batch.rows.request_ids[row],
            sequence=int(batch.rows.sequences[row]),
            token_offset=int(batch.rows.positions[row]),
            text_offset=self.text_offsets[place],
            chain=int(batch.rows.chains[row]),
            token_ids=batch.tokens(row),
            text=self.texts[place],
            end=self.ends.get(place),
            logprobs=None if logprobs is None else logprobs[0],
            num_prompt_tokens=prompts.get(row, 0),
        )
