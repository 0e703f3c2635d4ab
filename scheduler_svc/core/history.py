"""What is known of a sequence that another scheduler began: what the log holds, and what its client has."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from penstock.domain import chain
from penstock.domain.errors import stream_diverged
from penstock.domain.finish import FinishReason, RequestError
from penstock.domain.plan import NO_TOKENS, U32
from penstock.domain.rows import TokenRows
from scheduler_svc.core.sequence import QueuedRequest


@dataclass(slots=True)
class History:
    """The tokens of one sequence so far."""

    token_ids: list[int] = field(default_factory=list)
    chain: int = chain.CHAIN_START
    has_ended: bool = False

    def take(self, position: int, before: int, finish: int, token_ids: U32) -> None:
        """A row of the log, if it extends what came before."""
        if (position, before) == (len(self.token_ids), self.chain) and not self.has_ended:
            self.extend(token_ids)
            self.has_ended = finish != FinishReason.UNSPECIFIED

    def extend(self, token_ids: U32) -> None:
        """More tokens."""
        tokens = token_ids.tolist()
        self.token_ids += tokens
        self.chain = chain.extend(self.chain, tokens)

    def agrees_with(self, token_ids: U32) -> bool:
        """Whether one of the two is the beginning of the other, and nothing lies behind an end."""
        shared = min(len(self.token_ids), len(token_ids))
        is_longer = len(token_ids) > shared
        return self.token_ids[:shared] == token_ids[:shared].tolist() and not (is_longer and self.has_ended)


def restore(
    request_id: bytes,
    histories: Sequence[History],
    witness: Sequence[U32],
    finish_of: Callable[[Sequence[int]], FinishReason],
) -> TokenRows | None:
    """Extends histories by what clients have beyond them; generation goes on behind the longer of the two.

    An end that the tokens bring stands in the row of the token that brought it, as when it was sampled: a detokenizer
    leaves that token out of the text.

    Args:
        request_id: whose sequences they are.
        histories: one for each sequence, as the log has it.
        witness: u32[tokens] for each sequence: what its client has; may be fewer.
        finish_of: the end that a sequence's tokens have brought it.

    Returns:
        Rows of what the log lacks. None: some client has what does not belong to its log, and nothing was changed.
    """
    pairs = list(zip(histories, witness, strict=False))
    if not all(history.agrees_with(token_ids) for history, token_ids in pairs):
        return None
    sequences, positions, chains, lacking, finishes = [], [], [], [], []
    for index, (history, token_ids) in enumerate(pairs):
        if len(token_ids) > (position := len(history.token_ids)):
            sequences.append(index)
            positions.append(position)
            chains.append(history.chain)
            lacking.append(token_ids[position:])
            history.extend(token_ids[position:])
            finishes.append(finish_of(history.token_ids))
            history.has_ended = bool(finishes[-1])
    num_rows = len(sequences)
    return TokenRows(
        request_ids=[request_id] * num_rows,
        sequences=np.array(sequences, np.uint32),
        positions=np.array(positions, np.uint32),
        chains=np.array(chains, np.uint64),
        counts=np.array([len(each) for each in lacking], np.uint32),
        token_ids=np.concatenate(lacking) if lacking else NO_TOKENS,
        finishes=np.array(finishes, np.uint8),
        cached_tokens=np.zeros(num_rows, np.uint32),
    )


def continued(request: QueuedRequest, histories: Sequence[History]) -> QueuedRequest:
    """A request that goes on behind what is known of each of its sequences."""
    if not any(history.token_ids or history.has_ended for history in histories):
        return request
    return replace(
        request,
        output_token_ids=tuple(np.array(history.token_ids, np.uint32) for history in histories),
        ended_sequences=frozenset(index for index, history in enumerate(histories) if history.has_ended),
    )


def diverged_rows(request_id: bytes, histories: Sequence[History]) -> TokenRows:
    """Rows that end what goes on of a request which cannot be continued behind what its client has."""
    going_on = [(index, history) for index, history in enumerate(histories) if not history.has_ended]
    num_rows = len(going_on)
    return TokenRows(
        request_ids=[request_id] * num_rows,
        sequences=np.array([index for index, _ in going_on], np.uint32),
        positions=np.array([len(history.token_ids) for _, history in going_on], np.uint32),
        chains=np.array([history.chain for _, history in going_on], np.uint64),
        counts=np.zeros(num_rows, np.uint32),
        token_ids=NO_TOKENS,
        finishes=np.full(num_rows, FinishReason.ERROR, np.uint8),
        cached_tokens=np.zeros(num_rows, np.uint32),
        errors=dict.fromkeys(range(num_rows), RequestError.of(stream_diverged())),
    )
