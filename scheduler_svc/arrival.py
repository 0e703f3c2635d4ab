"""A request as it comes to a scheduler: new, or to be continued after what its log and its client have."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from contract.domain.beams import MAX_CANDIDATES
from contract.domain.errors import ErrorCode, PoisonMessageError
from contract.domain.finish import RequestError
from contract.domain.rows import TokenRows, unstarted_rows
from scheduler_svc.core.history import History, continued, diverged_rows, restore
from scheduler_svc.core.rows import NO_ROWS, finish_of
from scheduler_svc.core.sequence import QueuedRequest
from scheduler_svc.wire import decode_request, decode_witness, num_samples
from servicekit.bus.calls import StoredRequest


class Arrival(NamedTuple):
    """A request for the core, and rows for the log before all that it will get."""

    request: QueuedRequest | None  # None: its client has what does not belong to its log, and the rows end it
    rows: TokenRows  # what its client has and the log lacks


def read_arrival(stored: StoredRequest, histories: Sequence[History]) -> Arrival:
    """Read a request that the bus gave to this scheduler.

    Args:
        stored: the request.
        histories: of its sequences by the log, that of a search after those of its outputs; empty: nobody began it.

    Raises:
        PoisonMessageError: it cannot be read.
    """
    request_id = stored.request_id
    request = decode_request(request_id, stored.header, stored.body, stored.meta, stored.token_ids)
    witness, told = decode_witness(stored.witness, request.n)
    rows = NO_ROWS
    if histories or witness:
        histories = histories or [History() for _ in range(request.n)]
        began_on = (history.model_digest for history in histories if history.model_digest)
        model_digest = next(began_on, stored.model_digest)
        lacking = restore(request_id, histories, witness, told, partial(finish_of, request), model_digest=model_digest)
        if lacking is None:
            return Arrival(None, diverged_rows(request_id, histories[: request.n]))
        rows, request = lacking, continued(request, histories)
    _check_search(request)
    if stored.strikes:
        request = dataclasses.replace(request, num_strikes=stored.strikes, struck_at=stored.struck_at)
    return Arrival(request, rows)


def _check_search(request: QueuedRequest) -> None:
    try:
        search = request.search()
    except ValueError as error:
        raise PoisonMessageError(f"not the log of a search: {error}") from error
    if search is not None and search.rules.num_candidates > MAX_CANDIDATES:
        raise PoisonMessageError(f"a search of {request.n} beams, which no worker tells so many candidates for")


def damaged_rows(stored: StoredRequest) -> TokenRows:
    """The rows that end a request which cannot be read."""
    failure = RequestError(ErrorCode.INTERNAL, "the request was damaged on its way; send it again")
    return unstarted_rows(stored.request_id, num_samples(stored.body), failure)
