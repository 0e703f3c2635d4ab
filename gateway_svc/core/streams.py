"""The text that the client of one request has, and the rows that extend exactly that."""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np

from contract.domain import chain
from contract.domain.errors import ErrorCode, PenstockError
from contract.domain.finish import FinishReason
from contract.domain.logprob_records import first_records, pack_records
from contract.domain.rows import TextRow, TokenLogprob

WHOLE = (
    FinishReason.STOP,
    FinishReason.LENGTH,
    FinishReason.POOLED,
    FinishReason.REPETITION,
)  # ends after which nothing is missing


class Refusal(Enum):
    """The reason why a row is not taken."""

    KNOWN = "known"  # it brings nothing that the client does not have
    BEHIND = "behind"  # something is missing before it, or it is of another history: re-attach
    DIVERGED = "diverged"  # what the client claims to have is of another history


@dataclass(slots=True)
class DeliveredSequence:
    """The part of one sample that the client has."""

    num_tokens: int = 0
    num_chars: int = 0
    chain: int = chain.CHAIN_START  # over those tokens
    finish: FinishReason = FinishReason.UNSPECIFIED
    last_event: int = -1  # number of the last event that it has, where events are numbered; -1: it has none
    claim: int = -1  # output tokens that the client came with, by its own word; -1: all came from here
    token_ids: "array[int]" = field(default_factory=lambda: array("I"))  # the tokens; without those that it came with
    logprobs: bytearray | None = None  # `logprob_records` of all of `token_ids`; None: of some there are none

    @property
    def is_claimed(self) -> bool:
        """Return whether no row has confirmed yet what the client says it has."""
        return self.claim == self.num_tokens

    @property
    def is_witnessed(self) -> bool:
        """Return whether all tokens are known, not only those after what the client came with."""
        return len(self.token_ids) == self.num_tokens

    def learn(self, token_ids: Iterable[int], logprobs: bytes | None) -> None:
        """Takes over the tokens that the client came with, and the records of their logprobs, if they are those."""
        learnt = array("I", token_ids)
        if chain.extend(chain.CHAIN_START, learnt) == self.chain:
            self.token_ids = learnt
            self.logprobs = None if logprobs is None else bytearray(logprobs)

    def add(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> None:
        """The client has these tokens now."""
        if len(logprobs) != len(token_ids):
            self.logprobs = None
        elif self.logprobs is not None:
            self.logprobs += pack_records(logprobs)
        elif not self.num_tokens:
            self.logprobs = bytearray(pack_records(logprobs))
        self.num_tokens += len(token_ids)
        self.chain = chain.extend(self.chain, token_ids)
        self.token_ids.extend(token_ids)


class ClientStream:
    """All samples of one request; a row is taken at most once and never with a gap before it."""

    __slots__ = ("num_open", "sequences")

    def __init__(self, n: int, have: Sequence[DeliveredSequence] | None = None) -> None:
        """A client that has nothing, or that comes back with what it has of each of the `n` samples."""
        self.sequences = [DeliveredSequence() for _ in range(n)] if have is None else list(have)
        self.num_open = sum(not state.finish for state in self.sequences)  # samples that have not ended

    @property
    def ended(self) -> bool:
        """Return whether every sample has ended."""
        return self.num_open == 0

    @property
    def is_whole(self) -> bool:
        """Return whether the client has all of it, and no sample ended with an error."""
        return all(state.finish in WHOLE for state in self.sequences)

    def offsets(self) -> list[DeliveredSequence]:
        """From where the request's text is to go on, by sample; from its start where tokens are not known."""
        return [state if state.is_witnessed else DeliveredSequence() for state in self.sequences]

    def witness(self) -> tuple[bytes, ...]:
        """The tokens that the client has of each sample, u32 little-endian; none where not all of them are known.

        If it asked for logprobs, then the records of these follow, for each sample.
        """
        tokens = [np.array(state.token_ids, "<u4").tobytes() if state.is_witnessed else b"" for state in self.sequences]
        if all(state.logprobs is None for state in self.sequences):
            return tuple(tokens)
        return (*tokens, *(bytes(state.logprobs or b"") if state.is_witnessed else b"" for state in self.sequences))

    def remember(self, before: "ClientStream") -> None:
        """The client followed the same request here before: the tokens that it came with are those that it got."""
        for state, known in zip(self.sequences, before.sequences, strict=False):
            records = None
            if known.logprobs is not None and len(known.token_ids) >= state.num_tokens:
                records = first_records(bytes(known.logprobs), state.num_tokens)
            state.learn(known.token_ids[: state.num_tokens], records)

    def accept(self, row: TextRow) -> TextRow | Refusal:
        """Takes a row if it extends what the client has; the part of it that is new is the answer."""
        if row.sequence >= len(self.sequences):
            return Refusal.KNOWN
        state = self.sequences[row.sequence]
        if row.token_offset == 0 and not state.is_witnessed:
            logprobs = row.logprobs[: state.num_tokens]
            records = pack_records(logprobs) if len(logprobs) == state.num_tokens else None
            state.learn(row.token_ids[: state.num_tokens], records)
        if state.finish:
            return Refusal.DIVERGED if state.is_claimed and _contradicts(row, state) else Refusal.KNOWN
        if row.token_offset != state.num_tokens or row.text_offset != state.num_chars or row.chain != state.chain:
            if state.is_claimed and _contradicts(row, state):
                return Refusal.DIVERGED
            trimmed = _rest(row, state)
            if isinstance(trimmed, Refusal):
                return trimmed
            row = trimmed
        elif not row.token_ids and not row.text and not row.finish:
            return Refusal.KNOWN
        if row.token_ids:
            state.add(row.token_ids, row.logprobs)
        state.num_chars += len(row.text)
        if row.finish:
            state.finish = row.finish
            self.num_open -= 1
        return row


def _rest(row: TextRow, state: DeliveredSequence) -> TextRow | Refusal:
    """The part of a row after what the client has, for a row that begins earlier."""
    known_tokens = state.num_tokens - row.token_offset
    known_chars = state.num_chars - row.text_offset
    if known_tokens < 0 or known_chars < 0:
        return Refusal.BEHIND
    if known_tokens > len(row.token_ids) or known_chars > len(row.text):
        # An older row, sent again; one that ends its sequence before what the client has is of another history.
        return Refusal.BEHIND if row.finish else Refusal.KNOWN
    if chain.extend(row.chain, row.token_ids[:known_tokens]) != state.chain:
        return Refusal.BEHIND
    if known_tokens == len(row.token_ids) and known_chars == len(row.text) and not row.finish:
        return Refusal.KNOWN
    return replace(
        row,
        token_offset=state.num_tokens,
        text_offset=state.num_chars,
        chain=state.chain,
        token_ids=row.token_ids[known_tokens:],
        text=row.text[known_chars:],
        logprobs=row.logprobs[known_tokens:],
    )


def before(row: TextRow, rest: TextRow) -> TextRow | None:
    """The part of a row that stands before the rest of it; None: there is none."""
    num_tokens, num_chars = len(row.token_ids) - len(rest.token_ids), len(row.text) - len(rest.text)
    if not num_tokens and not num_chars:
        return None
    return replace(
        row,
        token_ids=row.token_ids[:num_tokens],
        text=row.text[:num_chars],
        logprobs=row.logprobs[:num_tokens],
        finish=FinishReason.UNSPECIFIED,
        stop_reason=None,
        error=None,
        usage=None,
    )


def error_of(row: TextRow) -> PenstockError | None:
    """The error with which a sequence ended; None: it did not."""
    if row.error is not None:
        return row.error.raised()
    if row.finish is FinishReason.CANCELLED:
        return PenstockError(ErrorCode.CANCELLED, "the request was cancelled")
    if row.finish is FinishReason.ERROR:
        return PenstockError(ErrorCode.INTERNAL, "the request ended with an error that says nothing")
    return None


def _contradicts(row: TextRow, state: DeliveredSequence) -> bool:
    """Return whether a row reaches the place that a client claims to be at, and shows that it was never there."""
    known_tokens = state.num_tokens - row.token_offset
    known_chars = state.num_chars - row.text_offset
    if known_tokens < 0:
        return False
    if known_tokens > len(row.token_ids):
        return bool(row.finish)  # the sequence is shorter
    if chain.extend(row.chain, row.token_ids[:known_tokens]) != state.chain:
        return True
    if state.finish and row.finish:
        return row.finish is not state.finish or (known_tokens, known_chars) != (len(row.token_ids), len(row.text))
    return not 0 <= known_chars <= len(row.text) or (known_tokens == 0 and known_chars != 0)


def split(row: TextRow, max_tokens: int, max_chars: int) -> list[TextRow]:
    """A row as rows of at most so much, each extending the one before; only the last one ends the sequence."""
    num_rows = max(-(-len(row.token_ids) // max_tokens), -(-len(row.text) // max_chars))
    if num_rows <= 1:
        return [row]
    rows = []
    known = row.chain
    for index in range(num_rows):
        first_token, first_char = index * max_tokens, index * max_chars
        part = replace(
            row,
            token_offset=row.token_offset + min(first_token, len(row.token_ids)),
            text_offset=row.text_offset + min(first_char, len(row.text)),
            chain=known,
            token_ids=row.token_ids[first_token : first_token + max_tokens],
            text=row.text[first_char : first_char + max_chars],
            logprobs=row.logprobs[first_token : first_token + max_tokens],
        )
        if index < num_rows - 1:
            part = replace(part, finish=FinishReason.UNSPECIFIED, stop_reason=None, error=None, usage=None)
        known = chain.extend(known, part.token_ids)
        rows.append(part)
    return rows


def merge(rows: Sequence[TextRow]) -> TextRow:
    """Rows of one sequence, each extending the one before, as one."""
    first, last = rows[0], rows[-1]
    if first is last:
        return first
    return replace(
        last,
        token_offset=first.token_offset,
        text_offset=first.text_offset,
        chain=first.chain,
        token_ids=tuple(token_id for row in rows for token_id in row.token_ids),
        text="".join(row.text for row in rows),
        logprobs=tuple(logprob for row in rows for logprob in row.logprobs),
    )
