"""Makes the rows of the log: the tokens of a result, and the ends that need no token."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from contract.domain import chain
from contract.domain.errors import ErrorCode, context_exceeded, model_replaced
from contract.domain.finish import CancelReason, FinishReason, RequestError
from contract.domain.model_kind import wrong_kind
from contract.domain.plan import F32, NO_FLOATS, NO_TOKENS, U32, Logprobs, StepResult
from contract.domain.pooling import is_done_by
from contract.domain.rows import U8, TokenRows
from contract.domain.timeline import Start
from scheduler_svc.core.repetition import RepetitionDetector
from scheduler_svc.core.sequence import QueuedRequest, SequenceState
from scheduler_svc.core.worker import I64, Mask, WorkerState

_GOES_ON = int(FinishReason.UNSPECIFIED)
OUTCOMES = (  # how a request may end, for counting
    *(each.name.lower() for each in FinishReason if each not in (FinishReason.UNSPECIFIED, FinishReason.ERROR)),
    *(each.name.lower() for each in ErrorCode),
)


@dataclass(frozen=True, slots=True)
class SequenceEnd:
    """A sequence ends after the tokens that are known."""

    sequence: SequenceState
    finish: FinishReason
    error: RequestError | None = None
    has_row: bool = True  # false where the detokenizer has decided the end already
    # Of an output that a search has found: all of it.
    token_ids: U32 = field(default_factory=lambda: NO_TOKENS)
    logprobs: F32 = field(default_factory=lambda: NO_FLOATS)  # of these tokens
    num_cached_tokens: int = 0
    start: Start | None = None
    model_digest: bytes = b""  # of the model that computed it

    @property
    def outcome(self) -> str:
        """One of `OUTCOMES`: a finish reason or an error code, in lower case."""
        return self.error.code.name.lower() if self.error else self.finish.name.lower()


def cancelled(sequence: SequenceState, reason: CancelReason) -> SequenceEnd:
    """The end that a cancel brings; STOP has been decided by the detokenizer and makes no row."""
    if reason is CancelReason.STOP:
        return SequenceEnd(sequence, FinishReason.STOP, has_row=False)
    error = cancel_error(reason)
    return SequenceEnd(sequence, FinishReason.ERROR if error else FinishReason.CANCELLED, error)


def cancel_error(reason: CancelReason) -> RequestError | None:
    """The error for a client that did not ask for the cancel; None: it is one of its own."""
    match reason:
        case CancelReason.DEADLINE:
            return RequestError(ErrorCode.DEADLINE_EXCEEDED, "the request's deadline passed before it ended")
        case CancelReason.SHUTDOWN:
            return RequestError(ErrorCode.UNAVAILABLE, "the service is shutting down; send the request again")
        case _:
            return None


def finish_of(request: QueuedRequest, output: Sequence[int]) -> FinishReason:
    """The end that its output tokens have brought a sequence; UNSPECIFIED: it goes on."""
    stopping = request.stopping
    if len(output) > stopping.min_tokens and output[-1] in request.all_stop_ids:
        return FinishReason.STOP
    if request.beams is not None:  # nothing of it is told before its end
        return FinishReason.LENGTH
    if stopping.max_tokens is not None and len(output) >= stopping.max_tokens:
        return FinishReason.LENGTH
    detection = stopping.repetition_detection
    if detection and len(output) > stopping.min_tokens and RepetitionDetector(detection, output).has_found:
        return FinishReason.REPETITION
    return FinishReason.UNSPECIFIED


def ended_by_tokens(sequence: SequenceState) -> SequenceEnd | None:
    """The end that the tokens of a sequence which another scheduler began have brought already, if any."""
    if sequence.request.search is not None:  # its tokens are those of a beam that goes on
        return None
    finish = finish_of(sequence.request.queued, sequence.output)
    return SequenceEnd(sequence, finish) if finish else None


def ended_by_strikes(sequence: SequenceState, num_alone: int) -> SequenceEnd:
    """The end of a sequence whose request has killed too many workers, the last `num_alone` of them while alone."""
    message = (
        f"{sequence.request.num_strikes} workers died while they computed this request, the last {num_alone} while it "
        "ran alone: it is not tried again. The logs of the workers say why they died"
    )
    return SequenceEnd(sequence, FinishReason.ERROR, RequestError(ErrorCode.INTERNAL, message))


def failed(sequence: SequenceState, message: str) -> SequenceEnd:
    """The end of a sequence that its worker cannot go on with."""
    return SequenceEnd(sequence, FinishReason.ERROR, RequestError(ErrorCode.INTERNAL, message))


def abandoned(sequence: SequenceState, gone_s: float) -> SequenceEnd:
    """The end of a sequence whose model has had no worker for so many seconds, while others had."""
    return SequenceEnd(sequence, FinishReason.ERROR, RequestError.of(model_replaced(gone_s)))


def unholdable(sequence: SequenceState, workers: Mapping[str, WorkerState]) -> SequenceEnd | None:
    """The end of a sequence that no worker with its model can hold; None while there is no such worker to ask."""
    if not sequence.request.num_prompt_tokens:
        error = RequestError(ErrorCode.INVALID_ARGUMENT, "the prompt has no tokens", "prompt")
        return SequenceEnd(sequence, FinishReason.ERROR, error)
    able = [worker for worker in workers.values() if worker.serves(sequence)]
    if not able or any(worker.holds(sequence) for worker in able):
        return None
    kinds = {worker.limits.model_kind for worker in able}
    if not any(is_done_by(kind, sequence.request.queued.pooling) for kind in kinds):
        return SequenceEnd(sequence, FinishReason.ERROR, RequestError.of(wrong_kind(min(kinds))))
    if sequence.output:
        return SequenceEnd(sequence, FinishReason.LENGTH)
    capacity = max(worker.limits.capacity for worker in able)
    room = "" if sequence.is_pooled else " and must leave room for one of output"
    why = f"the prompt has {sequence.num_tokens}{room}"
    return SequenceEnd(sequence, FinishReason.ERROR, RequestError.of(context_exceeded(capacity, why, "prompt")))


def end_rows(ends: list[SequenceEnd]) -> TokenRows:
    """The rows of ends, which have tokens only of a search; the sequences are in no slot (any more)."""
    token_ids = [end.token_ids for end in ends if len(end.token_ids)]
    logprobs = [end.logprobs for end in ends if len(end.token_ids)]
    models = {end.model_digest for end in ends if len(end.token_ids)}
    return TokenRows(
        request_ids=[end.sequence.request.request_id for end in ends],
        sequences=np.array([end.sequence.index for end in ends], np.uint32),
        positions=np.array([end.sequence.num_logged_tokens for end in ends], np.uint32),
        chains=np.array([end.sequence.chain for end in ends], np.uint64),
        counts=np.array([len(end.token_ids) for end in ends], np.uint32),
        token_ids=np.concatenate(token_ids) if token_ids else NO_TOKENS,
        finishes=np.array([end.finish for end in ends], np.uint8),
        cached_tokens=np.array([end.num_cached_tokens for end in ends], np.uint32),
        logprobs=Logprobs.sampled_alone(np.concatenate(logprobs)) if logprobs else None,
        starts={row: end.start for row, end in enumerate(ends) if end.start is not None},
        errors={row: end.error for row, end in enumerate(ends) if end.error is not None},
        model_digest=models.pop() if len(models) == 1 else b"",
    )


NO_ROWS = end_rows([])


def joined(rows: TokenRows, more: TokenRows) -> TokenRows:
    """Rows and, after them, further rows of the same model."""
    if not len(more):
        return rows
    if not len(rows):
        return more
    return TokenRows(
        request_ids=[*rows.request_ids, *more.request_ids],
        sequences=np.concatenate((rows.sequences, more.sequences)),
        positions=np.concatenate((rows.positions, more.positions)),
        chains=np.concatenate((rows.chains, more.chains)),
        counts=np.concatenate((rows.counts, more.counts)),
        token_ids=np.concatenate((rows.token_ids, more.token_ids)),
        finishes=np.concatenate((rows.finishes, more.finishes)),
        cached_tokens=np.concatenate((rows.cached_tokens, more.cached_tokens)),
        logprobs=_joined(rows, more),
        errors=rows.errors | {len(rows) + row: error for row, error in more.errors.items()},
        starts=rows.starts | {len(rows) + row: start for row, start in more.starts.items()},
        model_digest=rows.model_digest or more.model_digest,
    )


def _joined(rows: TokenRows, more: TokenRows) -> Logprobs | None:
    both = (rows, more)
    if all(each.logprobs is None for each in both):
        return None
    return Logprobs.joined([each.logprobs or Logprobs.unasked(len(each.token_ids)) for each in both])


def token_rows(worker: WorkerState, result: StepResult, valid: Mask) -> tuple[TokenRows, I64]:
    """The log's rows of a result: `valid` bool[rows] are those whose sequence still runs; a row is cut after the
    token that ends its sequence; that of a pooled prompt has none and ends it. Advances tokens, chains and received
    counts; returns the rows and their slots."""
    offsets = np.cumsum(result.counts, dtype=np.int64) - result.counts
    has_tokens = result.counts > 0
    pooled = worker.is_pooled[result.slots.astype(np.int64)] if worker.special_slots else None
    (rows,) = (valid & (has_tokens if pooled is None else has_tokens | pooled)).nonzero()
    slots, offsets = result.slots[rows].astype(np.int64), offsets[rows]
    positions = worker.num_received_tokens[slots] - worker.num_prompt_tokens[slots]
    chains = worker.chains[slots]
    counts, finishes = _extend(worker, slots, offsets, result.counts[rows], result.token_ids)
    if pooled is not None:
        finishes[pooled[rows]] = FinishReason.POOLED
    token_ids, logprobs = result.token_ids, result.logprobs
    num_tokens = int(counts.sum())
    if num_tokens != len(token_ids):
        starts = np.repeat(offsets - (np.cumsum(counts) - counts), counts)
        taken = starts + np.arange(num_tokens)
        token_ids = token_ids[taken]
        logprobs = None if logprobs is None else take_logprobs(logprobs, taken)
    cached = worker.num_cached_tokens[slots].astype(np.uint32)
    worker.num_cached_tokens[slots] = 0
    sequences = [worker.sequence_in(slot) for slot in slots.tolist()]
    made = TokenRows(
        request_ids=[sequence.request.request_id for sequence in sequences],
        sequences=np.array([sequence.index for sequence in sequences], np.uint32),
        positions=positions.astype(np.uint32),
        chains=chains,
        counts=counts.astype(np.uint32),
        token_ids=token_ids,
        finishes=finishes,
        cached_tokens=cached,
        logprobs=logprobs,
        model_digest=worker.model_digest,
        starts=worker.take_starts(slots),
    )
    return made, slots


def _extend(worker: WorkerState, slots: I64, offsets: I64, counts: U32, token_ids: U32) -> tuple[I64, U8]:
    """Give each slot its next tokens, all slots at once and one token after the other, until one ends the sequence.

    Returns i64[rows] the tokens that count, and u8[rows] how the sequences ended.
    """
    taken = np.zeros(len(slots), np.int64)
    finishes = np.zeros(len(slots), np.uint8)
    (active,) = counts.nonzero()  # a pooled prompt has none
    here, depth = slots[active], 0
    while len(active):
        tokens = token_ids[offsets[active] + depth]
        for slot, token_id in zip(here.tolist(), tokens.tolist(), strict=True):
            worker.sequence_in(slot).output.append(token_id)
        taken[active] += 1
        worker.chains[here] = chain.extend_columns(worker.chains[here], tokens)
        received = worker.num_received_tokens[here] + 1
        worker.num_received_tokens[here] = received
        ends = _ends(worker, here, received, tokens)
        if ends is not None:
            finishes[active] = ends
        depth += 1
        more = counts[active] > depth
        if not np.count_nonzero(more):
            break
        active = active[more & (finishes[active] == _GOES_ON)]
        here = slots[active]
    return taken, finishes


def _ends(worker: WorkerState, slots: I64, received: I64, tokens: U32) -> U8 | None:
    """u8[slots] the ends that `tokens` have brought, the last of `received` in each slot; None: no slot's."""
    full = received >= worker.max_num_tokens[slots]
    stops = worker.stops[slots] == tokens[:, None]
    repeats = _repeats(worker, slots, tokens) if worker.special_slots else np.False_
    if not np.count_nonzero(full) and not np.count_nonzero(stops) and not np.count_nonzero(repeats):
        return None
    may_end = received - worker.num_prompt_tokens[slots] > worker.min_tokens[slots]
    ends = np.where(repeats & may_end, FinishReason.REPETITION, _GOES_ON)
    ends = np.where(full, FinishReason.LENGTH, ends)
    return np.where(stops.any(axis=1) & may_end, FinishReason.STOP, ends).astype(np.uint8)


def _repeats(worker: WorkerState, slots: I64, tokens: U32) -> Mask:
    """bool[slots]: with `tokens`, its output repeats itself, and may not."""
    repeats = worker.may_not_repeat[slots]
    for row in repeats.nonzero()[0].tolist():
        detector = worker.sequence_in(int(slots[row])).repetition
        repeats[row] = detector is not None and detector.add(int(tokens[row]))
    return repeats


def take_logprobs(logprobs: Logprobs, tokens: I64) -> Logprobs:
    """The logprobs of some of the tokens."""
    ends = np.cumsum(logprobs.top_counts, dtype=np.int64)
    counts = logprobs.top_counts[tokens]
    starts = np.repeat(ends[tokens] - counts - (np.cumsum(counts, dtype=np.int64) - counts), counts)
    tops = starts + np.arange(int(counts.sum()))
    return Logprobs(
        sampled=logprobs.sampled[tokens],
        ranks=logprobs.ranks[tokens],
        top_counts=counts,
        top_ids=logprobs.top_ids[tops],
        top_logprobs=logprobs.top_logprobs[tops],
    )


def select_rows(rows: TokenRows, wanted: Mask) -> TokenRows:
    """The rows where `wanted` bool[rows] holds, for instance those of one shard of the log."""
    kept = np.flatnonzero(wanted)
    tokens = np.flatnonzero(np.repeat(wanted, rows.counts))
    return TokenRows(
        request_ids=[rows.request_ids[row] for row in kept.tolist()],
        sequences=rows.sequences[kept],
        positions=rows.positions[kept],
        chains=rows.chains[kept],
        counts=rows.counts[kept],
        token_ids=rows.token_ids[tokens],
        finishes=rows.finishes[kept],
        cached_tokens=rows.cached_tokens[kept],
        logprobs=None if rows.logprobs is None else take_logprobs(rows.logprobs, tokens),
        errors={new: rows.errors[old] for new, old in enumerate(kept.tolist()) if old in rows.errors},
        starts={new: rows.starts[old] for new, old in enumerate(kept.tolist()) if old in rows.starts},
        model_digest=rows.model_digest,
    )
