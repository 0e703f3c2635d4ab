"""Figures as vLLM's benchmark defines them."""

import pytest

from contract.domain.errors import PenstockError
from penstock.benchmark.measures import Times, figures, parse_goodput
from penstock.benchmark.stream import Outcome

FIRST = Outcome(10.0, 11.0, [10.2, 10.6, 11.0], prompt_tokens=5, output_tokens=5)
SECOND = Outcome(10.5, 12.0, [11.5], prompt_tokens=7, output_tokens=1)
FAILED = Outcome(10.0, 10.1, error="HTTP 503: away")


def test_the_times_of_a_request() -> None:
    times = Times.of(FIRST)
    assert (times.ttft, times.tpot, times.e2el) == pytest.approx((200.0, 200.0, 1000.0))
    assert times.itl == pytest.approx([400.0, 400.0])
    assert Times.of(SECOND).tpot is None


def test_the_figures_of_a_run_leave_out_what_failed() -> None:
    told = figures([FIRST, SECOND, FAILED], [50, 99], {})
    assert (told["completed"], told["failed"], told["duration"]) == (2, 1, 2.0)
    assert (told["request_throughput"], told["output_throughput"], told["total_token_throughput"]) == (1.0, 3.0, 9.0)
    assert told["mean_ttft_ms"] == pytest.approx((200.0 + 1000.0) / 2)
    assert told["p50_tpot_ms"] == told["p99_tpot_ms"] == pytest.approx(200.0)
    assert told["max_concurrent_requests"] == 2
    assert told["request_goodput"] is None


def test_a_run_in_which_all_failed_has_no_times() -> None:
    told = figures([FAILED], [50], {"ttft": 1.0})
    assert (told["completed"], told["mean_ttft_ms"], told["p50_e2el_ms"], told["request_goodput"]) == (0, None, None, 0)


def test_the_goodput_counts_requests_within_every_bound() -> None:
    bounds = parse_goodput(["ttft:300", "e2el:1200"])
    assert figures([FIRST, SECOND], [50], bounds)["request_goodput"] == 0.5


@pytest.mark.parametrize("word", ["ttft", "ttft:fast", "itl:3", ":3"])
def test_a_bound_that_is_none_is_refused(word: str) -> None:
    with pytest.raises(PenstockError, match="NAME:MILLISECONDS"):
        parse_goodput([word])
