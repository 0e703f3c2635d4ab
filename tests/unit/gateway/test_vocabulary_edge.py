"""Calls that need a vocabulary, at a gateway whose pool has no tokenizer that can be asked."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_keys import KEY
from running_gateway import RunningGateway

from gateway_svc import http_vocabulary

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
CALLS: dict[str, dict[str, Any]] = {
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1]},
    "/v1/chat/completions/render": CHAT,
}


@pytest.mark.parametrize("path", CALLS)
def test_who_can_be_answered_by_no_tokenizer_is_told_when_to_come_back(gateway: RunningGateway, path: str) -> None:
    reply = httpx.post(gateway.url + path, json=CALLS[path], timeout=300)
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "unavailable")
    assert int(reply.headers["retry-after"]) > 0
    assert "no tokenizer" in reply.json()["error"]["message"]


@pytest.mark.parametrize("body", [{"prompt": [7], "echo": True}, {"prompt": "hi", "return_token_ids": True}])
def test_a_reply_that_would_tell_its_prompt_is_refused_before_it_begins(
    gateway: RunningGateway, body: dict[str, Any]
) -> None:
    reply = httpx.post(f"{gateway.url}/v1/completions", json=body, timeout=300)
    assert reply.status_code == 503
    assert gateway.pipeline.incoming == []


def test_an_echo_of_a_text_needs_no_tokenizer(gateway: RunningGateway) -> None:
    reply = httpx.post(f"{gateway.url}/v1/completions", json={"prompt": "hi", "echo": True}, timeout=300)
    assert reply.json()["choices"][0]["text"].startswith("hi")


@pytest.mark.parametrize("path", CALLS)
def test_a_key_is_asked_for(launch: Callable[..., RunningGateway], keys_file: Path, path: str) -> None:
    url = launch(api_keys_file=keys_file).url + path
    assert httpx.post(url, json=CALLS[path], timeout=300).status_code == 401
    known = httpx.post(url, json=CALLS[path], headers={"authorization": f"Bearer {KEY}"}, timeout=300)
    assert known.status_code == 503


def test_fields_that_nobody_knows_are_refused_where_that_is_asked_for(launch: Callable[..., RunningGateway]) -> None:
    url = launch(strict_fields=True).url
    reply = httpx.post(f"{url}/tokenize", json={"prompt": "hi", "return_token_str": True}, timeout=300)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "return_token_str")


def test_others_are_answered_while_a_large_text_is_read(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    inner = http_vocabulary.parse_tokenize

    def slow(body: bytes) -> Any:
        begun.set()
        assert go_on.wait(120)
        return inner(body)

    monkeypatch.setattr(http_vocabulary, "parse_tokenize", slow)
    statuses: list[int] = []

    def call() -> None:
        statuses.append(httpx.post(f"{gateway.url}/tokenize", json={"prompt": "x" * 100_000}, timeout=240).status_code)

    caller = threading.Thread(target=call)
    caller.start()
    assert begun.wait(120)
    try:
        assert httpx.get(f"{gateway.url}/version", timeout=300).status_code == 200
    finally:
        go_on.set()
        caller.join(240)
    assert statuses == [503]
