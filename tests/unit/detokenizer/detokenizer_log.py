"""A log made by hand, and a client that checks what it gets."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from contract.domain import chain
from contract.domain.finish import FinishReason, RequestError
from contract.domain.request import Header
from contract.domain.rows import TextRow, TokenRows
from contract.domain.timeline import Start
from detokenizer_svc.core.detokenizer import Detokenizer
from detokenizer_svc.core.request import FinishedRequest, OpenRequest

GOES_ON = FinishReason.UNSPECIFIED


def header(request_id: bytes = b"r" * 16) -> Header:
    return Header(request_id, "tenant", 0, 1, 0, "", 7)


def opened(request_id: bytes = b"r" * 16, **fields: Any) -> OpenRequest:
    return OpenRequest(**{"header": header(request_id), "n": 1, "num_prompt_tokens": 7, **fields})


@dataclass(frozen=True)
class _Row:
    request_id: bytes
    sequence: int
    position: int
    chain: int
    token_ids: tuple[int, ...]
    finish: FinishReason
    error: RequestError | None
    cached_tokens: int
    start: Start | None


class Log:
    """Rows of one or more requests in order; iterating gives a batch a row."""

    def __init__(self, request: OpenRequest) -> None:
        self._request = request
        self._rows: list[_Row] = []
        self._ends: dict[int, tuple[int, int]] = {}

    def add(  # noqa: PLR0917
        self,
        sequence: int,
        token_ids: list[int],
        finish: FinishReason = GOES_ON,
        error: RequestError | None = None,
        cached_tokens: int = 0,
        start: Start | None = None,
    ) -> "Log":
        position, before = self._ends.get(sequence, (0, chain.CHAIN_START))
        self._rows.append(
            _Row(
                self._request.request_id,
                sequence,
                position,
                before,
                tuple(token_ids),
                finish,
                error,
                cached_tokens,
                start,
            )
        )
        self._ends[sequence] = (position + len(token_ids), chain.extend(before, token_ids))
        return self

    def rows_of_one(self, token_ids: list[int], finish: FinishReason = GOES_ON) -> "Log":
        for token_id in token_ids[:-1]:
            self.add(0, [token_id])
        return self.add(0, token_ids[-1:], finish)

    def cut(self, data: st.DataObject, token_ids: list[int], finish: FinishReason) -> "Log":
        """Rows of any length; the end with the last tokens or in a row of its own."""
        left = list(token_ids)
        while left and (size := data.draw(st.integers(1, len(left)))) < len(left):
            self.add(0, left[:size])
            left = left[size:]
        if left and data.draw(st.booleans()):
            self.add(0, left)
            left = []
        return self.add(0, left, finish)

    def join(self, other: "Log") -> None:
        self._rows += other._rows

    def __iter__(self) -> Iterator[TokenRows]:
        return (_batch([row]) for row in self._rows)

    def batch(self) -> TokenRows:
        return _batch(self._rows)

    def last(self) -> TokenRows:
        return _batch(self._rows[-1:])


def _batch(rows: list[_Row]) -> TokenRows:
    return TokenRows(
        request_ids=[row.request_id for row in rows],
        sequences=np.array([row.sequence for row in rows], np.uint32),
        positions=np.array([row.position for row in rows], np.uint32),
        chains=np.array([row.chain for row in rows], np.uint64),
        counts=np.array([len(row.token_ids) for row in rows], np.uint32),
        token_ids=np.array([token_id for row in rows for token_id in row.token_ids], np.uint32),
        finishes=np.array([row.finish for row in rows], np.uint8),
        cached_tokens=np.array([row.cached_tokens for row in rows], np.uint32),
        errors={i: row.error for i, row in enumerate(rows) if row.error is not None},
        starts={i: row.start for i, row in enumerate(rows) if row.start is not None},
    )


class Client:
    """Takes text rows as a gateway does: each must extend what it has, by offsets and hash."""

    def __init__(self, n: int) -> None:
        self.texts = [""] * n
        self.token_ids: list[list[int]] = [[] for _ in range(n)]
        self.ends: list[Any] = [None] * n

    def take(self, row: TextRow) -> None:
        i = row.sequence
        assert self.ends[i] is None
        assert row.token_offset == len(self.token_ids[i])
        assert row.text_offset == len(self.texts[i])
        assert row.chain == chain.extend(chain.CHAIN_START, self.token_ids[i])
        self.texts[i] += row.text
        self.token_ids[i] += row.token_ids
        if row.finish:
            self.ends[i] = (row.finish, row.stop_reason, row.error, row.usage)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Client) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]


def run(detokenizer: Detokenizer, request: OpenRequest, log: Iterable[TokenRows]) -> tuple[Client, FinishedRequest]:
    """Feeds a whole log; the request must end exactly once."""
    detokenizer.open(request, b"g")
    client = Client(request.n)
    retirements = []
    for rows in log:
        effects = detokenizer.push(rows)
        for row in effects.rows():
            client.take(row)
        retirements += effects.retirements
    (retirement,) = retirements
    return client, retirement.result
