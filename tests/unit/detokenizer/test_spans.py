"""A request that has ended, as the spans of a trace."""

import pytest

from contract.domain.errors import ErrorCode
from contract.domain.finish import FinishReason, RequestError, Usage
from contract.domain.request import Header
from contract.domain.timeline import Computed, Run, Start, StartReason, Timeline
from detokenizer_svc.core.spans import Asked, Span, Trace, delivery, is_sampled, spans

ID = bytes(range(16))
CALLER = f"00-{'ab' * 16}-{'cd' * 8}-01"
RUNS = [
    Run(0, 0, Start(400, StartReason.FIRST), Computed("a", b"a" * 16, 4, 500)),
    Run(0, 7, Start(700, StartReason.WORKER_LOST), Computed("b", b"b" * 16, 1, 750)),
]
WHOLE = Timeline(150, 200, 300, RUNS, finished_ns=900, retired_ns=950)


def _trace(
    timeline: Timeline = WHOLE, *, traceparent: str = "", error: RequestError | None = None, tenant: str = ""
) -> Trace:
    header = Header(ID, tenant, 0, 100, 0, traceparent, 1)
    reason = FinishReason.ERROR if error else FinishReason.STOP
    return Trace(header, Asked("m", temperature=0.5), Usage(5, 9, 2), timeline, (reason,), error)


def _times(found: list[Span]) -> dict[str, tuple[int, int]]:
    return {span.name: (span.start_ns, span.end_ns) for span in found}


def test_every_hop_begins_where_the_one_before_it_ends() -> None:
    assert _times([*spans(_trace()), delivery(_trace(), 970)]) == {
        "text_completion m": (100, 950),
        "submit": (100, 150),
        "tokenize": (150, 200),
        "queue": (200, 400),
        "prefill": (400, 500),
        "decode": (500, 900),
        "detokenize": (900, 950),
        "deliver": (900, 970),
    }


def test_a_move_to_another_worker_is_an_event() -> None:
    (decode,) = (span for span in spans(_trace()) if span.name == "decode")
    (event,) = decode.events
    assert (event.name, event.at_ns) == ("worker_lost", 700)
    assert event.attributes == {
        "penstock.worker": "b",
        "penstock.step": 1,
        "penstock.sample": 0,
        "penstock.position": 7,
    }


def test_hops_are_children_of_the_request_and_that_is_one_of_the_callers_span() -> None:
    request, *hops = spans(_trace(traceparent=CALLER))
    assert request.parent_id == bytes.fromhex("cd" * 8)
    assert {each.trace_id for each in (request, *hops)} == {bytes.fromhex("ab" * 16)}
    assert {each.parent_id for each in hops} == {request.span_id}
    assert len({each.span_id for each in (request, *hops, delivery(_trace(), 1))}) == len(hops) + 2


def test_without_a_caller_the_trace_has_the_requests_id() -> None:
    request, *_ = spans(_trace())
    assert (request.trace_id, request.parent_id) == (ID, b"")


def test_whoever_makes_them_makes_the_same() -> None:
    assert spans(_trace()) == spans(_trace())


def test_an_error_is_told_and_hops_that_were_not_reached_are_left_out() -> None:
    error = RequestError(ErrorCode.INVALID_ARGUMENT, "no such thing", "prompt")
    rejected = _trace(Timeline(opened_ns=180, finished_ns=190, retired_ns=195), error=error)
    request, *hops = spans(rejected)
    assert [each.name for each in hops] == ["submit", "detokenize"]
    assert (request.error, request.attributes["error.type"]) == ("no such thing", "invalid_argument")
    assert request.attributes["gen_ai.response.finish_reasons"] == ("error",)


def test_a_request_that_was_given_up_in_the_queue_ends_there() -> None:
    waited = _trace(Timeline(150, 200, 300, finished_ns=900, retired_ns=950))
    assert _times(spans(waited))["queue"] == (200, 900)


def test_conventions_for_models_name_what_was_asked_and_used() -> None:
    attributes = spans(_trace(tenant="t"))[0].attributes
    assert attributes["gen_ai.usage.input_tokens"] == 5
    assert attributes["gen_ai.usage.output_tokens"] == 9
    assert attributes["gen_ai.usage.cache_read.input_tokens"] == 2
    assert attributes["gen_ai.request.temperature"] == 0.5
    assert attributes["penstock.tenant"] == "t"
    assert "gen_ai.request.top_p" not in attributes, "it was not said"


def test_no_hop_ends_before_it_begins_whatever_the_hosts_clocks_say() -> None:
    skewed = Timeline(50, 40, 30, RUNS, finished_ns=20, retired_ns=10)
    assert all(span.start_ns <= span.end_ns for span in (*spans(_trace(skewed)), delivery(_trace(skewed), 5)))


@pytest.mark.parametrize(("flags", "is_traced"), [("01", True), ("00", False), ("03", True), ("02", False)])
def test_the_caller_decides_whether_its_request_is_traced(flags: str, is_traced: bool) -> None:
    header = Header(ID, "", 0, 0, 0, CALLER[:-2] + flags, 0)
    assert is_sampled(header, 0.0) is is_traced
    assert is_sampled(header, 1.0) is is_traced


@pytest.mark.parametrize("ratio", [0.0, 0.25, 0.5, 1.0])
def test_without_its_word_a_part_of_the_requests_is(ratio: float) -> None:
    headers = [Header(bytes(8) + (number << 56).to_bytes(8, "big"), "", 0, 0, 0, "", 0) for number in range(256)]
    assert sum(is_sampled(header, ratio) for header in headers) == 256 * ratio
