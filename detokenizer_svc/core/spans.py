"""A request that has ended as the spans of a trace (OpenTelemetry; names as its semantic conventions for GenAI 1.45).

Whoever makes them makes the same: ids are hashes of the request's, times are those of its timeline. So a collector that
is told twice has nothing twice.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

from contract.domain.finish import FinishReason, RequestError, Usage
from contract.domain.request import Header, format_request_id
from contract.domain.timeline import Run, StartReason, Timeline

Attribute = str | int | float | tuple[str, ...]

_TRACEPARENT_BYTES = 55  # version, trace, parent and flags, in hexadecimal digits
_SAMPLED = 1  # of the flags
_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "cancelled",
    FinishReason.POOLED: "pooled",
    FinishReason.REPETITION: "repetition",
}


@dataclass(frozen=True, slots=True)
class Asked:
    """The part of a request that its trace tells; None: it said nothing."""

    model: str = ""
    is_chat: bool = False
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """A request that has ended, without its texts and tokens."""

    header: Header
    asked: Asked
    usage: Usage
    timeline: Timeline
    reasons: tuple[FinishReason, ...] = ()  # by sample
    error: RequestError | None = None

    @property
    def trace_id(self) -> bytes:
        """16 bytes: of its caller's trace; without one, the request's own id."""
        return bytes.fromhex(self.header.trace_id) if self.header.traceparent else self.header.request_id

    @property
    def parent_id(self) -> bytes:
        """8 bytes: the caller's span; empty: there is none."""
        return bytes.fromhex(self.header.traceparent[36:52])


@dataclass(frozen=True, slots=True)
class Event:
    """A moment of a span."""

    name: str
    at_ns: int
    attributes: Mapping[str, Attribute] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a trace."""

    name: str
    trace_id: bytes
    span_id: bytes
    parent_id: bytes  # empty: it has none
    start_ns: int  # Unix time
    end_ns: int
    attributes: Mapping[str, Attribute]
    is_entry: bool = False  # the pipeline's answer to a call
    events: tuple[Event, ...] = ()
    error: str = ""  # why it failed


def is_sampled(header: Header, ratio: float) -> bool:
    """Return whether a request is traced: its caller decides if it says so, else its id, so that all agree.

    Args:
        header: of the request.
        ratio: which part of the requests whose callers say nothing.
    """
    if len(header.traceparent) == _TRACEPARENT_BYTES:
        return bool(int(header.traceparent[-2:], 16) & _SAMPLED)
    return int.from_bytes(header.request_id[8:], "big") < ratio * 2**64


class _Hop(NamedTuple):
    name: str
    service: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Attribute] = {}
    events: tuple[Event, ...] = ()


def spans(trace: Trace) -> list[Span]:
    """The whole request and its way through the hops, up to its result; those that it did not reach are left out."""
    timeline, accepted_ns, usage = trace.timeline, trace.header.arrival_ns, trace.usage
    ended_ns = max(accepted_ns, timeline.retired_ns, timeline.finished_ns)
    finished_ns = timeline.finished_ns or ended_ns
    admitted_ns, first_ns = timeline.admitted_ns, timeline.first_token_ns
    hops = [_Hop("submit", "gateway", accepted_ns, timeline.tokenizing_ns or finished_ns)]
    if timeline.tokenized_ns:
        input_tokens = {"gen_ai.usage.input_tokens": usage.num_prompt_tokens}
        hops.append(_Hop("tokenize", "tokenizer", timeline.tokenizing_ns, timeline.tokenized_ns, input_tokens))
        claimed = (Event("claimed", timeline.opened_ns),) if timeline.opened_ns else ()
        hops.append(_Hop("queue", "scheduler", timeline.tokenized_ns, admitted_ns or finished_ns, events=claimed))
    if timeline.runs:
        first, *others = timeline.runs
        cached = _place(first) | {"gen_ai.usage.cache_read.input_tokens": usage.num_cached_tokens}
        output = _place(first) | {"gen_ai.usage.output_tokens": usage.num_output_tokens}
        hops.append(_Hop("prefill", "worker", admitted_ns, first_ns, cached))
        hops.append(_Hop("decode", "worker", first_ns, finished_ns, output, tuple(map(_start, others))))
    hops.append(_Hop("detokenize", "detokenizer", finished_ns, ended_ns))
    return [_entry(trace, ended_ns), *(_span(trace, hop) for hop in hops)]


def delivery(trace: Trace, delivered_ns: int) -> Span:
    """The last hop: until the client had all of the request."""
    began_ns = trace.timeline.finished_ns or trace.timeline.retired_ns or delivered_ns
    return _span(trace, _Hop("deliver", "gateway", began_ns, delivered_ns))


def _entry(trace: Trace, ended_ns: int) -> Span:
    asked, usage = trace.asked, trace.usage
    operation = "chat" if asked.is_chat else "text_completion"
    attributes: dict[str, Attribute | None] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "penstock",
        "gen_ai.request.model": asked.model,
        "gen_ai.request.temperature": asked.temperature,
        "gen_ai.request.top_p": asked.top_p,
        "gen_ai.request.max_tokens": asked.max_tokens,
        "gen_ai.response.id": format_request_id(trace.header.request_id),
        "gen_ai.response.finish_reasons": tuple(_REASONS.get(reason, "error") for reason in trace.reasons),
        "gen_ai.usage.input_tokens": usage.num_prompt_tokens,
        "gen_ai.usage.output_tokens": usage.num_output_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.num_cached_tokens,
        "penstock.tenant": trace.header.tenant or None,
        "error.type": trace.error.code.name.lower() if trace.error else None,
    }
    return Span(
        f"{operation} {asked.model}".rstrip(),
        trace.trace_id,
        _span_id(trace, "request"),
        trace.parent_id,
        trace.header.arrival_ns,
        ended_ns,
        {name: value for name, value in attributes.items() if value is not None},
        is_entry=True,
        error=trace.error.message if trace.error else "",
    )


def _span(trace: Trace, hop: _Hop) -> Span:
    return Span(
        hop.name,
        trace.trace_id,
        _span_id(trace, hop.name),
        _span_id(trace, "request"),
        hop.start_ns,
        max(hop.start_ns, hop.end_ns),  # by the clocks of several hosts a hop may end before it begins
        {"penstock.service": hop.service, **hop.attributes},
        events=hop.events,
    )


def _place(run: Run) -> dict[str, Attribute]:
    return {"penstock.worker": run.computed.worker, "penstock.step": run.computed.step}


def _start(run: Run) -> Event:
    reason = "further sample" if run.start.reason is StartReason.FIRST else run.start.reason.name.lower()
    told: dict[str, Attribute] = {"penstock.sample": run.sequence, "penstock.position": run.position}
    return Event(reason, run.start.at_ns, _place(run) | told)


def _span_id(trace: Trace, name: str) -> bytes:
    return blake2b(trace.header.request_id + name.encode(), digest_size=8, person=b"penstock span").digest()
