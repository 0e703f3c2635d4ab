"""The steps of beams: what their slots found is chosen from, and each beam that goes on forks from its parent's blocks.

A beam computes one step at a time, since the next token is chosen among those of all beams: until then it keeps its
slot and blocks, and nothing is planned for it. The beams that go on then enter slots anew, with their parents' blocks,
the last one copied. A beam keeps its slot only while all of them are on one worker and none waits, so that none waits
for what another keeps; else the chosen ones wait as after a preemption, and compute again what no cache has of them.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from contract.domain.finish import FinishReason
from contract.domain.plan import StepResult
from contract.domain.rows import TokenRows
from scheduler_svc.core.beams import Found, Hypothesis
from scheduler_svc.core.plan_draft import PlanDraft
from scheduler_svc.core.planned_steps import StepError
from scheduler_svc.core.requests import Requests
from scheduler_svc.core.rows import NO_ROWS, SequenceEnd, joined, take_logprobs
from scheduler_svc.core.search import Search
from scheduler_svc.core.sequence import ScheduledRequest, SequenceState, Status
from scheduler_svc.core.tables import Tables, held_blocks
from scheduler_svc.core.worker import Mask, WorkerState


class Taken(NamedTuple):
    """The share of beams in a result."""

    sequences: Sequence[SequenceState] = ()  # those that have computed their step
    rows: TokenRows = NO_ROWS  # of the choices
    ends: Sequence[SequenceEnd] = ()


NOTHING = Taken()


def take(worker: WorkerState, requests: Requests, result: StepResult, valid: Mask) -> Taken:
    """Take what beams found out of the rows of a settled result that are `valid`, and choose where all have found.

    Raises:
        StepError: a beam got no logprobs.
    """
    mine = (valid & worker.is_beam[result.slots.astype(np.int64)] & (result.counts > 0)).nonzero()[0]
    if not len(mine):
        return NOTHING
    valid[mine] = False
    sequences = [worker.sequence_in(slot) for slot in result.slots[mine].tolist()]
    _note_starts(worker, sequences)
    offsets = np.cumsum(result.counts, dtype=np.int64) - result.counts
    for sequence, offset in zip(sequences, offsets[mine].tolist(), strict=True):
        search_of(sequence).found[sequence.index] = _found(worker, result, offset)
        _keep_or_leave(worker, sequence)
    return Taken(sequences, *_choose_of(worker, requests, dict.fromkeys(each.request for each in sequences)))


def fork(worker: WorkerState, requests: Requests, draft: PlanDraft, budget: int) -> int:
    """Give the beams that were chosen slots in place of their parents', a token each of `budget`; returns what is left.

    Beams for which there is no room wait.
    """
    for request, parents in list(worker.forking.items()):
        seated = [each for each in request.sequences if each.status is Status.RUNNING]
        places = {each.index: (each.slot, each.tables) for each in seated}
        for sequence in seated:
            draft.held.append(held_blocks(sequence.tables))
            worker.blocks.share(draft.held[-1])  # until the plan is made: what is copied from must not be copied to
            worker.vacate(sequence)
        for sequence in request.sequences[: len(parents)]:
            sequence.status = Status.RUNNING  # or waits
        for sequence, parent in zip(request.sequences, parents, strict=False):
            budget -= _seat(worker, requests, draft, sequence, places[parent], budget)
    return budget


def together(sequence: SequenceState) -> list[SequenceState]:
    """The sequences of a worker that leave it if one does: a beam's siblings keep nothing for it."""
    if sequence.request.search is None:
        return [sequence]
    return [each for each in sequence.request.sequences if each.worker_id == sequence.worker_id]


def whole(ends: Iterable[SequenceEnd]) -> Iterator[SequenceEnd]:
    """Ends with those of searches whole: what ends one beam ends them all, by length with their outputs."""
    for end in ends:
        request = end.sequence.request
        if request.search is None or len(end.token_ids):
            yield end
        elif end.finish is FinishReason.LENGTH:
            yield from _ended(request, request.search.concluded())
        else:
            yield from (replace(end, sequence=each) for each in request.sequences)


def search_of(sequence: SequenceState) -> Search:
    """The search of a beam."""
    search = sequence.request.search
    assert search is not None
    return search


def _found(worker: WorkerState, result: StepResult, token: int) -> Found:
    """The likeliest tokens beside one of a result."""
    if result.logprobs is None or not result.logprobs.top_counts[token]:
        raise StepError(worker.worker_id, f"result of step {result.step} lacks the logprobs of a beam")
    told = take_logprobs(result.logprobs, np.array([token]))
    return Found(told.top_ids, told.top_logprobs)


def _note_starts(worker: WorkerState, sequences: Sequence[SequenceState]) -> None:
    """Take over what the log is to tell of slots, and of the prompt in the first of them."""
    slots = np.array([sequence.slot for sequence in sequences], np.int64)
    starts = worker.take_starts(slots)
    for row, sequence in enumerate(sequences):
        num_cached_tokens = int(worker.num_cached_tokens[sequence.slot])
        search_of(sequence).note_start(starts.get(row), num_cached_tokens)
    worker.num_cached_tokens[slots] = 0


def _keep_or_leave(worker: WorkerState, sequence: SequenceState) -> None:
    """A beam has computed its step: it keeps its slot if none of the others waits or is elsewhere."""
    beams = sequence.request.sequences[: search_of(sequence).width]
    if all(each.worker_id == worker.worker_id for each in beams):
        worker.park(sequence)
    else:
        worker.vacate(sequence)
        sequence.status = Status.HELD


def _choose_of(
    worker: WorkerState, requests: Requests, searching: Iterable[ScheduledRequest]
) -> tuple[TokenRows, list[SequenceEnd]]:
    """The choices of those of some requests all of whose beams have found."""
    rows, ends = NO_ROWS, list[SequenceEnd]()
    for request in searching:
        if (search := search_of(request.sequences[0])).has_all:
            told, ended = _choose(worker, requests, request, search)
            rows, ends = joined(rows, told), ends + ended
    return rows, ends


def _choose(
    worker: WorkerState, requests: Requests, request: ScheduledRequest, search: Search
) -> tuple[TokenRows, list[SequenceEnd]]:
    """A step's choice: the row that tells it, or the ends that it brings."""
    chosen = search.choose()
    parents = search.advance(chosen)
    max_tokens = request.max_num_tokens(worker.limits.capacity) - request.num_prompt_tokens
    if (hypotheses := search.outcome(max_tokens)) is not None:
        return NO_ROWS, _ended(request, hypotheses)
    request.go_on_from(parents)
    if all(request.sequences[parent].worker_id == worker.worker_id for parent in parents):
        worker.forking[request] = parents
    else:
        requests.wait(request.sequences[0])  # and all others with it
    return search.rows(request.request_id, request.queued.n, chosen, worker.model_digest), []


def _ended(request: ScheduledRequest, hypotheses: Sequence[Hypothesis]) -> list[SequenceEnd]:
    """The ends of a request's outputs, each with all of its tokens."""
    search = search_of(request.sequences[0])
    start = search.take_start()
    return [
        SequenceEnd(
            sequence,
            search.finish_of(each),
            token_ids=np.array(each.token_ids, np.uint32),
            logprobs=np.array(each.logprobs, np.float32),
            num_cached_tokens=search.num_cached_tokens,
            start=None if sequence.index else start,
            model_digest=request.model_digest or b"",
        )
        for sequence, each in zip(request.sequences, hypotheses, strict=True)
    ]


def _seat(  # noqa: PLR0917
    worker: WorkerState,
    requests: Requests,
    draft: PlanDraft,
    sequence: SequenceState,
    parent: tuple[int, Tables],
    budget: int,
) -> int:
    """Put a beam into a slot, with the blocks of its parent's and, where layers keep one, the state in the parent's
    slot: both are of all tokens but the newest. Returns the tokens that it takes of `budget`.
    """
    slot, tables = parent
    reused = worker.rules.shared(tables, sequence.num_tokens - 1)
    has_room = budget and worker.has_slot and worker.holds(sequence)
    if reused is None or not has_room or not worker.has_blocks(sequence, reused):
        requests.wait(sequence)
        return 0
    worker.place(sequence, reused)
    draft.admit(sequence, replace(reused, state=slot) if worker.limits.has_state else reused)
    return draft.advance(worker, sequence, budget)
