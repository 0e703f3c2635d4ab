"""The bytes of a stream, as `curl -N` shows them."""

import json

import httpx
import pytest
from naive_client import naive_events
from served import ENDLESS_TOKENS, Served, wait_until


def test_events_are_lines_of_json_and_the_last_says_done(simulated: Served) -> None:
    body = {"model": "simulated", "prompt": "abc", "max_tokens": 5, "stream": True, "temperature": 0}
    with httpx.stream("POST", f"{simulated.http_url}/v1/completions", json=body, timeout=300) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        events = [line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert len({chunk["id"] for chunk in chunks}) == 1


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/completions", {"prompt": "abc"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "abc"}]}),
    ],
    ids=["completion", "chat"],
)
def test_a_client_that_knows_nothing_but_data_reads_every_event(
    simulated: Served, path: str, prompt: dict[str, object]
) -> None:
    body = {"model": "simulated", "max_tokens": 20, "ignore_eos": True, "stream": True, **prompt}
    body |= {"stream_options": {"include_usage": True}}
    with httpx.stream("POST", f"{simulated.http_url}{path}", json=body, timeout=300) as reply:
        *chunks, last = naive_events(reply.iter_raw())
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "length"
    assert last["usage"]["completion_tokens"] == 20


def test_text_comes_token_by_token_and_not_at_the_end(simulated: Served) -> None:
    body = {"model": "simulated", "prompt": "abc", "max_tokens": ENDLESS_TOKENS, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{simulated.http_url}/v1/completions", json=body, timeout=300) as reply:
        lines = reply.iter_lines()
        first = next(line for line in lines if line.startswith("data: "))
        with simulated.client() as client:
            running = [session.owned_requests for session in client.pipeline().sessions if session.kind == "scheduler"]
        assert json.loads(first.removeprefix("data: "))["choices"][0]["finish_reason"] is None
        assert sum(running) >= 1


def test_a_client_that_leaves_frees_what_its_request_held(simulated: Served) -> None:
    body = {"model": "simulated", "prompt": "abc", "max_tokens": ENDLESS_TOKENS, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{simulated.http_url}/v1/completions", json=body, timeout=300) as reply:
        next(reply.iter_lines())

    with simulated.client() as client:

        def all_is_free() -> bool:
            sessions = client.pipeline().sessions
            return not any(
                session.owned_requests + session.status.figures.get("blocks_used", 0.0)
                for session in sessions
                if session.kind == "scheduler"
            )

        wait_until(all_is_free, "blocks free")


def test_health_metrics_and_version_answer(simulated: Served) -> None:
    assert httpx.get(f"{simulated.http_url}/health", timeout=300).json()["status"] == "ok"
    assert "penstock_requests_total" in httpx.get(f"{simulated.http_url}/metrics", timeout=300).text
    assert httpx.get(f"{simulated.http_url}/version", timeout=300).json()["version"]
