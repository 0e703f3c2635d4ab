"""The times of a call, for who asks after its end."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from contract.domain.request import format_request_id
from contract.domain.timeline import Run, StartReason, Timeline
from gateway_svc.core.reply_form import ReplyForm

_REASONS = {
    StartReason.FIRST: "first",
    StartReason.PREEMPTED: "preempted",
    StartReason.WORKER_LOST: "worker_lost",
    StartReason.TAKEN_OVER: "taken_over",
}


@dataclass(frozen=True, slots=True)
class Passage:
    """One request of a call, as far as it has come."""

    request_id: bytes
    state: str
    timeline: Timeline | None  # None: it has not ended
    delivered_ns: int = 0  # Unix time; 0: its client has not had all of it


def timeline_fields(form: ReplyForm, state: str, passages: Sequence[Passage]) -> dict[str, Any]:
    """The body of a call's timeline: milliseconds after the gateway had accepted it, by the clocks of the hosts."""
    head = form.head
    return {
        "id": head.call_id,
        "object": "request.timeline",
        "created": head.created_s,
        "model": head.model,
        "state": state,
        "accepted_unix_ms": form.arrival_ns / 1e6,
        "requests": [
            {
                "request_id": format_request_id(each.request_id, form.pool),
                "state": each.state,
                "moments": list(_moments(form.arrival_ns, each)),
                "num_more_starts": 0 if each.timeline is None else each.timeline.num_more_runs,
            }
            for each in passages
        ],
    }


def _moments(accepted_ns: int, passage: Passage) -> Iterator[dict[str, Any]]:
    """In the order of the hops."""

    def moment(name: str, at_ns: int, **more: Any) -> Iterator[dict[str, Any]]:
        if at_ns:
            yield {"name": name, "ms": _ms(accepted_ns, at_ns), **more}

    yield from moment("accepted", accepted_ns)
    timeline = passage.timeline
    if timeline is None:
        return
    yield from moment("tokenizing", timeline.tokenizing_ns)
    yield from moment("tokenized", timeline.tokenized_ns)
    yield from moment("claimed", timeline.opened_ns)
    for run in timeline.runs:
        yield from moment("started", run.start.at_ns, **_run_fields(accepted_ns, run))
    yield from moment("last_token", timeline.finished_ns)
    yield from moment("result", timeline.retired_ns)
    yield from moment("delivered", passage.delivered_ns)


def _run_fields(accepted_ns: int, run: Run) -> dict[str, Any]:
    """A sample's time in one slot of a worker."""
    computed = run.computed
    first_token_ms = _ms(accepted_ns, computed.sent_ns) if computed.sent_ns else None
    return {
        "reason": _REASONS[run.start.reason],
        "sample": run.sequence,
        "num_tokens": run.position,  # that it had before
        "worker": computed.worker,
        "step": computed.step,
        "first_token_ms": first_token_ms,
    }


def _ms(accepted_ns: int, at_ns: int) -> float:
    return round((at_ns - accepted_ns) / 1e6, 3)
