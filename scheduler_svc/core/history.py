"""The history of a sequence that another scheduler began: what the log holds, and what its client has."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from contract.domain import chain
from contract.domain.errors import stream_diverged
from contract.domain.finish import FinishReason, RequestError
from contract.domain.plan import NO_TOKENS, U32, Logprobs
from contract.domain.rows import TokenRows
from scheduler_svc.core.rows import take_logprobs
from scheduler_svc.core.sequence import QueuedRequest


@dataclass(slots=True)
class History:
    """The tokens of one sequence so far."""

    token_ids: list[int] = field(default_factory=list)
    chain: int = chain.CHAIN_START
    has_ended: bool = False
    model_digest: bytes = b""  # of the model that generated them; empty: there are none

    def take(self, position: int, before: int, finish: int, token_ids: U32, model_digest: bytes) -> None:
        """A row of the log, if it extends what came before."""
        if (position, before) == (len(self.token_ids), self.chain) and not self.has_ended:
            self.extend(token_ids)
            self.model_digest = self.model_digest or model_digest
            self.has_ended = finish != FinishReason.UNSPECIFIED

    def extend(self, token_ids: U32) -> None:
        """More tokens."""
        tokens = token_ids.tolist()
        self.token_ids += tokens
        self.chain = chain.extend(self.chain, tokens)

    def agrees_with(self, token_ids: U32) -> bool:
        """Return whether one of the two is the beginning of the other, and nothing lies after an end."""
        shared = min(len(self.token_ids), len(token_ids))
        is_longer = len(token_ids) > shared
        return self.token_ids[:shared] == token_ids[:shared].tolist() and not (is_longer and self.has_ended)


def restore(
    request_id: bytes,
    histories: Sequence[History],
    witness: Sequence[U32],
    logprobs: Sequence[Logprobs | None],
    finish_of: Callable[[Sequence[int]], FinishReason],
    *,
    model_digest: bytes,
) -> TokenRows | None:
    """Extends histories by what clients have beyond them; generation goes on after the longer of the two.

    An end that the tokens bring stands in the row of the token that brought it, as when it was sampled: a detokenizer
    leaves that token out of the text.

    Args:
        request_id: whose sequences they are.
        histories: one for each sequence, as the log has it.
        witness: u32[tokens] for each sequence: what its client has; may be fewer.
        logprobs: of these tokens, or of the first of them; None where there are none.
        finish_of: the end that a sequence's tokens have brought it.
        model_digest: of the model that computed the witness.

    Returns:
        Rows of what the log lacks. None: some client has what does not belong to its log, and nothing was changed.
    """
    pairs = list(zip(histories, witness, strict=False))
    if not all(history.agrees_with(token_ids) for history, token_ids in pairs):
        return None
    sequences, positions, chains, lacking, finishes = [], [], [], [], []
    told: list[Logprobs | None] = []
    for index, (history, token_ids) in enumerate(pairs):
        if len(token_ids) > (position := len(history.token_ids)):
            sequences.append(index)
            positions.append(position)
            chains.append(history.chain)
            lacking.append(token_ids[position:])
            told.append(logprobs[index] if index < len(logprobs) else None)
            history.extend(token_ids[position:])
            finishes.append(finish_of(history.token_ids))
            history.has_ended = bool(finishes[-1])
            history.model_digest = history.model_digest or model_digest
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
        model_digest=model_digest,
        logprobs=_joined(told, positions, [len(each) for each in lacking]),
    )


def _joined(told: Sequence[Logprobs | None], positions: Sequence[int], counts: Sequence[int]) -> Logprobs | None:
    """The logprobs of `counts` tokens of each sequence from `positions` on; NaN where they are not told."""
    if all(each is None for each in told):
        return None
    parts = []
    for logprobs, position, count in zip(told, positions, counts, strict=True):
        known = np.arange(0 if logprobs is None else max(0, min(count, len(logprobs.sampled) - position))) + position
        parts += [] if logprobs is None else [take_logprobs(logprobs, known)]
        parts.append(Logprobs.unasked(count - len(known)))
    return Logprobs.joined(parts)


def continued(request: QueuedRequest, histories: Sequence[History]) -> QueuedRequest:
    """A request that goes on after what is known of each of its sequences and, after them, of its search."""
    if not any(history.token_ids or history.has_ended for history in histories):
        return request
    samples, searches = histories[: request.n], histories[request.n :]
    return replace(
        request,
        search_words=np.array([word for search in searches for word in search.token_ids], np.uint32),
        # All sequences of a request are generated by one model.
        model_digest=next((history.model_digest for history in histories if history.model_digest), None),
        output_token_ids=tuple(np.array(history.token_ids, np.uint32) for history in samples),
        ended_sequences=frozenset(index for index, history in enumerate(samples) if history.has_ended),
    )


def diverged_rows(request_id: bytes, histories: Sequence[History]) -> TokenRows:
    """Rows that end what goes on of a request which cannot be continued after what its client has."""
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
