"""Anthropic's Messages at a gateway: keys, errors and streams as its clients know them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from api_keys import KEY, WRONG_KEY, bearer
from running_gateway import RunningGateway
from scripted_pipeline import ERROR, Incoming

from contract.domain.errors import ErrorCode
from contract.v1 import common_pb2

PATH = "/v1/messages"
BODY: dict[str, Any] = {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
Launch = Callable[..., RunningGateway]


def told(reply: httpx.Response) -> tuple[int, str]:
    """The status and the type of an error in Anthropic's shape."""
    fields = reply.json()
    assert set(fields) == {"type", "error"}
    assert fields["type"] == "error"
    assert set(fields["error"]) == {"type", "message"}
    return reply.status_code, fields["error"]["type"]


def fail_midway(request: Incoming) -> None:
    error = common_pb2.Error(code=common_pb2.ErrorCode.ValueType(ErrorCode.UNAVAILABLE), message="gone")
    request.send(request.row("hel"))
    request.send(request.row("", [], finish=ERROR, error=error))


def test_a_key_comes_as_either_api_has_it(launch: Launch, keys_file: Path) -> None:
    url = launch(api_keys_file=keys_file).url
    for path in (PATH, "/v1/chat/completions"):
        for headers in ({"x-api-key": KEY}, bearer(KEY)):
            assert httpx.post(url + path, json=BODY, headers=headers, timeout=300).status_code == 200
    for headers in ({}, {"x-api-key": WRONG_KEY}, {"x-api-key": ""}, {"x-api-key": KEY} | bearer(WRONG_KEY)):
        for path in (PATH, f"{PATH}/count_tokens"):
            reply = httpx.post(url + path, json=BODY, headers=headers, timeout=300)
            assert told(reply) == (401, "authentication_error")


def test_all_errors_of_its_routes_have_its_shape(gateway: RunningGateway) -> None:
    def call(method: str = "POST", path: str = PATH, **more: Any) -> tuple[int, str]:
        return told(httpx.request(method, gateway.url + path, timeout=300, **more))

    assert call(json=BODY | {"max_tokens": None}) == (400, "invalid_request_error")
    assert call(json=BODY | {"model": "large"}) == (404, "not_found_error")
    assert call(content=b"{}") == (415, "invalid_request_error")
    assert call("GET") == (405, "invalid_request_error")
    assert call(path=f"{PATH}/batches", json={}) == (404, "not_found_error")
    assert call(path=f"{PATH}/count_tokens", json=BODY) == (503, "overloaded_error")
    assert call("PUT", f"{PATH}/count_tokens") == (405, "invalid_request_error")


def test_an_error_in_a_stream_is_an_event_of_its_shape(gateway: RunningGateway) -> None:
    gateway.pipeline.script = fail_midway
    reply = httpx.post(gateway.url + PATH, json=BODY | {"stream": True}, timeout=300)
    *_, last = reply.text.strip().split("\n\n")
    kind, data = last.split("\n")
    fields = {"type": "error", "error": {"type": "overloaded_error", "message": "gone"}}
    assert (kind, json.loads(data.removeprefix("data: "))) == ("event: error", fields)


def test_a_stream_begins_with_the_tokens_of_its_prompt_and_ends_with_all_that_was_used(gateway: RunningGateway) -> None:
    gateway.pipeline.script = lambda request: request.say("hel", "lo")
    reply = httpx.post(gateway.url + PATH, json=BODY | {"stream": True}, timeout=300)
    events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: ")]
    assert [each["type"] for each in events] == [
        *("message_start", "ping", "content_block_start", "content_block_delta", "content_block_delta"),
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    began, ended = events[0]["message"]["usage"], events[-2]["usage"]
    assert (began["input_tokens"], began["output_tokens"]) == (7, 0)
    assert (ended["input_tokens"], ended["cache_read_input_tokens"], ended["output_tokens"]) == (4, 3, 2)


def test_a_response_that_fails_says_so_twice(gateway: RunningGateway) -> None:
    gateway.pipeline.script = fail_midway
    reply = httpx.post(f"{gateway.url}/v1/responses", json={"input": "hi", "stream": True}, timeout=300)
    events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: ")]
    error, failed = events[-2:]
    assert (error["type"], error["code"], error["message"]) == ("error", "unavailable", "gone")
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["error"] == {"code": "server_error", "message": "gone"}
    assert failed["response"]["output"][0]["content"][0]["text"] == "hel"
    numbers = [each["sequence_number"] for each in events]
    assert numbers == sorted(set(numbers))
