"""The rows that a compaction keeps of a request: few, and all that the log has told of it."""

from collections.abc import Sequence as SequenceOf

import numpy as np

from contract.domain.chain import CHAIN_START
from contract.domain.finish import FinishReason, RequestError
from contract.domain.plan import Logprobs
from contract.domain.rows import TokenRows
from contract.domain.timeline import Timeline
from detokenizer_svc.core.sequence import Sequence


def logged_rows(
    sequences: SequenceOf[Sequence], num_cached_tokens: int, model_digest: bytes, timeline: Timeline
) -> TokenRows:
    """The rows that give a new `Detokenizer` the same sequences, and a scheduler the same histories.

    They say what the log said, not what was made of it: a stop string is found in them again. After it there is
    nothing, as nothing of that was taken.

    Args:
        sequences: all of one request, in order of their indices.
        num_cached_tokens: prompt tokens that were found in the prefix cache.
        model_digest: of the model that computed them.
        timeline: of the request.
    """
    pieces = [(sequence, *piece) for sequence in sequences for piece in _pieces(sequence)]
    firsts = [sequence for sequence, position, *_ in pieces if position == 0 and len(sequence.token_ids)]
    errors = [error for *_, error in pieces]
    return TokenRows(
        request_ids=[sequence.request.request_id for sequence, *_ in pieces],
        sequences=np.array([sequence.index for sequence, *_ in pieces], np.uint32),
        positions=np.array([position for _, position, *_ in pieces], np.uint32),
        chains=np.array([sequence.chain if position else CHAIN_START for sequence, position, *_ in pieces], np.uint64),
        counts=np.array([len(sequence.token_ids) - position for sequence, position, *_ in pieces], np.uint32),
        token_ids=np.concatenate(
            [np.array(sequence.token_ids, np.uint32) for sequence in firsts] or [np.empty(0, np.uint32)]
        ),
        finishes=np.array([finish for *_, finish, _ in pieces], np.uint8),
        cached_tokens=np.array([0 if position else num_cached_tokens for _, position, *_ in pieces], np.uint32),
        logprobs=_logprobs(firsts),
        errors={row: error for row, error in enumerate(errors) if error is not None},
        model_digest=model_digest,
        timeline=timeline,
    )


def _pieces(sequence: Sequence) -> list[tuple[int, FinishReason, RequestError | None]]:
    """The rows of one sequence: position, finish and error. The first has all tokens; a second one only ends it."""
    goes_on = (0, FinishReason.UNSPECIFIED, None)
    told, num_tokens = sequence.told, len(sequence.token_ids)
    if told is None:
        return [goes_on] if num_tokens else []
    if told.has_tokens or not num_tokens:
        return [(0, told.finish, told.error)]
    return [goes_on, (num_tokens, told.finish, told.error)]


def _logprobs(sequences: list[Sequence]) -> Logprobs | None:
    logs = [sequence.logprobs for sequence in sequences]
    if all(log is None for log in logs):
        return None
    return Logprobs.joined(
        [
            Logprobs.unasked(len(sequence.token_ids)) if log is None else log.columns()
            for sequence, log in zip(sequences, logs, strict=True)
        ]
    )
