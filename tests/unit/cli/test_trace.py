"""`penstock trace`: moments of a request become stages, and stages lines."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli.trace import Bar, lines, stages


def start(ms: float, first_ms: float | None, **more: Any) -> dict[str, Any]:
    fields = {"reason": "first", "sample": 0, "num_tokens": 0, "worker": "w", "step": 3, "first_token_ms": first_ms}
    return {"name": "started", "ms": ms, **fields, **more}


def moments(*starts: dict[str, Any], **times: float) -> list[dict[str, Any]]:
    return [{"name": name, "ms": ms} for name, ms in times.items()] + list(starts)


WHOLE = {
    "accepted": 0.0,
    "tokenizing": 1.0,
    "tokenized": 2.0,
    "claimed": 2.5,
    "last_token": 30.0,
    "result": 31.0,
    "delivered": 32.0,
}


def test_a_request_goes_through_all_stages() -> None:
    assert list(stages(moments(start(4.0, 10.0), **WHOLE))) == [
        Bar("submit", 0.0, 1.0),
        Bar("tokenize", 1.0, 2.0),
        Bar("queue", 2.0, 4.0, "claimed at 2.5"),
        Bar("prefill", 4.0, 10.0, "w step 3"),
        Bar("decode", 10.0, 30.0),
        Bar("detokenize", 30.0, 31.0),
        Bar("deliver", 30.0, 32.0),
    ]


def test_another_slot_is_told_with_its_reason_and_each_sample_has_its_own() -> None:
    again = start(20.0, 25.0, reason="worker_lost", num_tokens=7, worker="v")
    bars = list(stages(moments(start(4.0, 10.0), again, start(5.0, 11.0, sample=1), **WHOLE)))
    assert [bar for bar in bars if bar.name.endswith(" 0")] == [
        Bar("prefill 0", 4.0, 10.0, "w step 3"),
        Bar("decode 0", 10.0, 20.0),
        Bar("prefill 0", 20.0, 25.0, "v step 3, worker_lost after 7 tokens"),
        Bar("decode 0", 25.0, 30.0),
    ]
    assert Bar("decode 1", 11.0, 30.0) in bars


@pytest.mark.parametrize(
    "times", [{"accepted": 0.0, "result": 3.0}, {"accepted": 0.0, "tokenizing": 1.0, "result": 3.0}]
)
def test_what_was_refused_has_the_stages_that_it_reached(times: dict[str, float]) -> None:
    assert [bar.name for bar in stages(moments(**times))] == ["submit", "detokenize"]


def body(state: str, *requests: list[dict[str, Any]]) -> dict[str, Any]:
    told = [{"request_id": "ab", "state": state, "moments": each, "num_more_starts": 2} for each in requests]
    return {"id": "cmpl-ab", "model": "m", "state": state, "requests": told}


def test_each_stage_is_a_line_with_a_bar() -> None:
    head, *rest, more = lines(body("ended", moments(start(4.0, 10.0), **WHOLE)))
    assert head == "cmpl-ab  m  ended"
    assert [line.split()[0] for line in rest] == [
        "submit", "tokenize", "queue", "prefill", "decode", "detokenize", "deliver",
    ]  # fmt: skip
    assert all("█" in line for line in rest)
    assert "2 more starts" in more


def test_what_has_not_ended_says_so() -> None:
    assert "it has not ended" in list(lines(body("running", [{"name": "accepted", "ms": 0.0}])))[-1]


@given(st.lists(st.floats(0, 1e7), min_size=9, max_size=9))
def test_no_line_is_longer_than_a_terminal_bears_whatever_the_clocks_say(times: list[float]) -> None:
    names = ("accepted", "tokenizing", "tokenized", "claimed", "last_token", "result", "delivered")
    drawn = lines(body("ended", moments(start(times[7], times[8]), **dict(zip(names, times, strict=False)))))
    assert all(len(line) < 160 for line in drawn)
