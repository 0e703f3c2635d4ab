"""Streams as clients read them that know nothing of server-sent events but `data: `."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from naive_client import naive_events
from running_gateway import RunningGateway, eventually
from scripted_pipeline import Incoming

from gateway_svc.sinks import SseSink

COMPLETION = ("/v1/completions", {"prompt": "x"})
CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})


@pytest.mark.parametrize(("path", "body"), [COMPLETION, CHAT], ids=["completion", "chat"])
def test_an_event_is_one_line_of_json_after_data(gateway: RunningGateway, path: str, body: dict[str, Any]) -> None:
    asked = {"model": "tiny", "stream": True, "stream_options": {"include_usage": True}, **body}
    with httpx.stream("POST", gateway.url + path, json=asked, timeout=300) as reply:
        *chunks, last = naive_events(reply.iter_raw(7))
    choices = [chunk["choices"][0] for chunk in chunks]
    texts = [each.get("text") or each.get("delta", {}).get("content") or "" for each in choices]
    assert "".join(texts) == "Hello world"
    assert choices[-1]["finish_reason"] == "stop"
    assert last["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(("path", "body"), [COMPLETION, CHAT], ids=["completion", "chat"])
def test_no_character_of_a_text_ends_a_line(gateway: RunningGateway, path: str, body: dict[str, Any]) -> None:
    """Many clients split a stream at all that Unicode calls the end of a line, as `str.splitlines` does."""
    said = "".join(chr(number) for number in range(0x3000) if len(f"a{chr(number)}b".splitlines()) > 1)
    assert {"\x85", "\u2028", "\u2029"} < set(said)
    gateway.pipeline.script = lambda request: request.say(f"“{said}”")
    asked = {"model": "tiny", "stream": True, **body}
    with httpx.stream("POST", gateway.url + path, json=asked, timeout=300) as reply:
        *lines, end = [line for line in reply.iter_lines() if line]
    choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
    assert "".join(each.get("text") or each.get("delta", {}).get("content") or "" for each in choices) == f"“{said}”"
    assert end == "data: [DONE]"


def silent(request: Incoming) -> None:
    """What is said is said by the test."""


def until_comments(parts: Iterator[bytes], number: int) -> bytes:
    """What came until there were so many comments."""
    heard = b""
    while heard.count(b": keep-alive\n\n") < number:
        heard += next(parts)
    return heard


@pytest.mark.parametrize(("path", "body"), [COMPLETION, CHAT], ids=["completion", "chat"])
def test_a_silent_stream_is_kept_alive_by_comments_that_clients_pass_over(
    launch: Callable[..., RunningGateway], path: str, body: dict[str, Any]
) -> None:
    gateway = launch(sse_keep_alive_s=0.02)
    gateway.pipeline.script = silent
    asked = {"model": "tiny", "stream": True, "max_tokens": 9, **body}
    with httpx.stream("POST", gateway.url + path, json=asked, timeout=300) as reply:
        parts = reply.iter_raw()
        heard = until_comments(parts, 2)
        assert heard.replace(b": keep-alive\n\n", b"") == b""
        (request,) = gateway.pipeline.wait_for()
        request.send(request.row("a"))
        heard += until_comments(parts, 2)
        request.say("b")
        chunks = naive_events([heard, *parts])
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(each.get("text") or each.get("delta", {}).get("content") or "" for each in choices) == "ab"


def test_an_error_after_the_first_comment_is_an_event(launch: Callable[..., RunningGateway]) -> None:
    gateway = launch(sse_keep_alive_s=0.02)
    gateway.pipeline.script = silent
    asked = {"model": "tiny", "stream": True, "prompt": "x"}
    with httpx.stream("POST", gateway.url + "/v1/completions", json=asked, timeout=300) as reply:
        parts = reply.iter_raw()
        until_comments(parts, 1)
        (request,) = gateway.pipeline.wait_for()
        request.send(request.row("", [], finish=3))
        (error,) = naive_events(parts)
    assert error["error"]["code"] == "cancelled"


def test_a_client_that_left_is_not_kept_alive(launch: Callable[..., RunningGateway]) -> None:
    gateway = launch(sse_keep_alive_s=0.02)
    gateway.pipeline.script = silent
    closed = []
    close = SseSink.close

    def note(sink: SseSink) -> None:
        close(sink)
        closed.append(sink)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SseSink, "close", note)
        with gateway.post({"model": "tiny", "stream": True, "prompt": "x"}) as client:
            assert client.recv(1)
        eventually(lambda: bool(closed))
    (sink,) = closed
    assert sink._timer is not None
    assert sink._timer.cancelled()
