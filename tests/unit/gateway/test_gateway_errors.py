"""Every way of asking wrongly, and what is said about it."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from running_gateway import RunningGateway
from scripted_pipeline import CANCELLED, ERROR, Incoming

from contract.domain.errors import ErrorCode, Fault, PenstockError
from contract.v1 import common_pb2
from gateway_svc.core.admission import AdmissionLimits
from gateway_svc.core.openai import parse_chat, parse_completion
from gateway_svc.sinks import error_headers

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"model": "tiny", "prompt": "hi"}


def chat(**fields: Any) -> bytes:
    return json.dumps({**CHAT, **fields}).encode()


def completion(**fields: Any) -> bytes:
    return json.dumps({**COMPLETION, **fields}).encode()


def refused(parse: Callable[[bytes], Any], body: bytes) -> PenstockError:
    with pytest.raises(PenstockError) as caught:
        parse(body)
    return caught.value


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"temperature": -1}, "temperature", "[0, 100]"),
        ({"temperature": "hot"}, "temperature", "Expected `float | null`"),
        ({"temperature": 1e300}, "temperature", "[0, 100]"),
        ({"top_p": 0}, "top_p", "(0, 1]"),
        ({"top_p": 1.5}, "top_p", "(0, 1]"),
        ({"top_k": -2}, "top_k", "integer"),
        ({"top_k": 2**40}, "top_k", "integer"),
        ({"min_p": 2}, "min_p", "[0, 1]"),
        ({"presence_penalty": 3}, "presence_penalty", "[-2, 2]"),
        ({"repetition_penalty": 0}, "repetition_penalty", "(0, 100]"),
        ({"max_tokens": 0}, "max_tokens", "integer"),
        ({"max_tokens": 1.5}, "max_tokens", "Expected `int | null`"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "exceeds"),
        ({"n": 0}, "n", "integer"),
        ({"n": 10**9}, "n", "integer"),
        ({"seed": 2**70}, "seed", "integer"),
        ({"stop": ["a"] * 17}, "stop", "at most 16"),
        ({"stop": [""]}, "stop", "1 to"),
        ({"stop": [1]}, "stop[0]", "Expected `str`"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "token id in decimal"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "[-100, 100]"),
        ({"stop_token_ids": [-1]}, "stop_token_ids", "integer"),
        ({"priority": 2**40}, "priority", "32-bit"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("form", ["chat", "completion"])
def test_parameters_out_of_bounds_are_named(form: str, fields: dict[str, Any], param: str, text: str) -> None:
    parse, body = (parse_chat, chat) if form == "chat" else (parse_completion, completion)
    error = refused(parse, body(**fields))
    assert (error.param, error.kind.http_status) == (param, 400)
    assert text in error.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
         "messages[0].content[0]"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"prompt": "x"}, "prompt"),
        ({"add_special_tokens": True}, "add_special_tokens"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_object", "strict": True}}, "response_format"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": "[]"}}, "structured_outputs.json"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        ({"structured_outputs": {"regex": "a"}, "guided_regex": "a"}, "guided_regex"),
        ({"guided_regex": "a", "guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"guided_json": {}, "ignore_eos": True}, "ignore_eos"),
    ],
)  # fmt: skip
def test_malformed_chats_are_named(fields: dict[str, Any], param: str) -> None:
    assert refused(parse_chat, chat(**fields)).param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1, [2]]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [2**32]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": ["x"] * 1025}, "prompt"),
        ({"prompt": ["x"] * 100, "n": 100}, "n"),
        ({"prompt_token_ids": [1]}, "prompt_token_ids"),
        ({"messages": []}, "messages"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"logprob_token_ids": [1]}, "logprob_token_ids"),
        ({"logprob_token_ids": list(range(129)), "logprobs": 0}, "logprob_token_ids"),
        ({"logprob_token_ids": [1], "logprobs": 0, "echo": True, "max_tokens": 0}, "logprob_token_ids"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"use_beam_search": True, "logprobs": 1}, "logprobs"),
    ],
)
def test_malformed_completions_are_named(fields: dict[str, Any], param: str) -> None:
    assert refused(parse_completion, completion(**fields)).param == param


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b'"x"', b'{"temperature": NaN, "prompt": "x"}', b'{"prompt": "\xff"}', b"null"]
)
def test_bad_json_is_the_callers_fault(body: bytes) -> None:
    assert refused(parse_completion, body).code is ErrorCode.INVALID_ARGUMENT


@pytest.mark.parametrize("parse", [parse_chat, parse_completion])
@pytest.mark.parametrize(
    "body", [b'{"prompt":' + b"[" * 100_000, b'{"user":' + b'{"a":' * 5000 + b"1" + b"}" * 5001, b"[" * 100_000]
)
def test_json_that_is_nested_too_deeply_is_the_callers_fault(parse: Callable[[bytes], Any], body: bytes) -> None:
    assert refused(parse, body).code is ErrorCode.INVALID_ARGUMENT


@pytest.mark.parametrize("depth", [62, 64, 500])
def test_what_a_chat_template_is_given_has_a_bounded_depth(depth: int) -> None:
    nested = json.loads("[" * depth + "]" * depth)
    for fields in (
        {"messages": [{"role": "user", "content": "x", "more": nested}]},
        {"chat_template_kwargs": {"more": nested}},
    ):
        if depth < 64:
            parse_chat(chat(**fields))
        else:
            assert "64 levels deep" in refused(parse_chat, chat(**fields)).message


def test_fields_that_ask_for_nothing_pass_and_unknown_ones_are_told() -> None:
    ask = parse_completion(completion(echo=False, best_of=1, suffix=None, functions=[], user="u", brand_new={"a": 1}))
    assert ask.ignored_fields == ("brand_new",)


def error_of(reply: httpx.Response) -> dict[str, Any]:
    assert reply.headers["content-type"] == "application/json"
    body = reply.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    return error


def test_errors_have_openais_shape(http: httpx.Client) -> None:
    reply = http.post("/v1/completions", content=completion(temperature=-1))
    assert reply.status_code == 400
    error = error_of(reply)
    assert (error["type"], error["param"], error["code"]) == (
        "invalid_request_error",
        "temperature",
        "invalid_argument",
    )
    reply = http.post("/v1/chat/completions", content=chat(model="gpt-5"))
    assert (reply.status_code, error_of(reply)["code"]) == (404, "model_not_found")
    reply = http.post("/v1/chat/completions", content=chat(functions=[{"name": "f"}]))
    assert (reply.status_code, error_of(reply)["param"], error_of(reply)["code"]) == (400, "functions", "unimplemented")
    reply = http.post("/v1/edits", content=b"{}")
    assert (reply.status_code, error_of(reply)["code"]) == (404, "not_found")
    reply = http.get("/v1/completions")
    assert (reply.status_code, error_of(reply)["code"]) == (405, "invalid_argument")
    reply = http.post("/v1/completions", content=completion(), headers={"x-request-timeout-s": "-3"})
    assert (reply.status_code, error_of(reply)["param"]) == (400, "x-request-timeout-s")


@pytest.mark.parametrize("code", [code for code in ErrorCode if code is not ErrorCode.UNSPECIFIED])
def test_what_must_not_be_sent_again_says_so_and_what_may_says_when(code: ErrorCode) -> None:
    error = PenstockError(code, "why", retry_after_s=2.5)
    headers = dict(error_headers(error))
    assert (headers.get(b"x-should-retry") == b"false") == (error.fault is not Fault.NOBODY)
    status = error.kind.http_status
    assert headers.get(b"retry-after") == (b"3" if status in (429, 503) else None)
    assert status != 501  # which clients send again


@pytest.mark.parametrize(
    ("fields", "headers", "error"),
    [
        ({"tools": [{"type": "function"}]}, {}, openai.BadRequestError),
        ({}, {"idempotency-key": "taken"}, openai.ConflictError),
    ],
)
def test_openais_client_does_not_send_again_what_is_the_callers_fault(
    gateway: RunningGateway, fields: dict[str, Any], headers: dict[str, str], error: type[openai.APIStatusError]
) -> None:
    sent: list[httpx.Request] = []
    with (
        httpx.Client(event_hooks={"request": [sent.append]}, timeout=300) as http,
        openai.OpenAI(base_url=gateway.url + "/v1", api_key="none", max_retries=2, http_client=http) as client,
    ):
        taken = {"extra_headers": {"idempotency-key": "taken"}}
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}], **taken)
        sent.clear()
        with pytest.raises(error) as caught:
            client.chat.completions.create(**CHAT, **fields, extra_headers=headers)
    assert len(sent) == 1
    assert caught.value.response.headers["x-should-retry"] == "false"


def test_openais_client_comes_again_when_it_is_told_to(gateway: RunningGateway) -> None:
    sent: list[httpx.Request] = []

    def let_in(request: httpx.Request) -> None:
        sent.append(request)
        limits = AdmissionLimits(max_streams=1 if len(sent) == 1 else 0)
        gateway.service.pools.all[0].reception._crowd.limits = limits

    with (
        httpx.Client(event_hooks={"request": [let_in]}, timeout=300) as http,
        openai.OpenAI(base_url=gateway.url + "/v1", api_key="none", max_retries=1, http_client=http) as client,
    ):
        assert len(client.completions.create(model="tiny", prompt=["a", "b"]).choices) == 2
    assert len(sent) == 2


def test_an_oversized_body_is_refused_while_it_is_read(launch: Callable[..., RunningGateway]) -> None:
    gateway = launch(max_body_bytes=2000)
    with httpx.Client(base_url=gateway.url, headers={"content-type": "application/json"}, timeout=300) as http:
        reply = http.post("/v1/completions", content=completion(prompt="x" * 3000))
        assert (reply.status_code, error_of(reply)["code"]) == (413, "request_too_large")
        # Chunked: its length is not told before.
        reply = http.post("/v1/completions", content=iter([b"{", b" " * 1500, b" " * 1500]))
        assert (reply.status_code, error_of(reply)["code"]) == (413, "request_too_large")
        assert http.post("/v1/completions", content=completion(prompt="x" * 1000)).status_code == 200


def test_too_many_requests_are_told_to_come_back(launch: Callable[..., RunningGateway]) -> None:
    gateway = launch(max_streams=1)
    with httpx.Client(base_url=gateway.url, headers={"content-type": "application/json"}, timeout=300) as http:
        reply = http.post("/v1/completions", content=completion(prompt=["a", "b"]))
        assert (reply.status_code, error_of(reply)["type"]) == (429, "rate_limit_error")
        assert reply.headers["retry-after"] == "1"
    assert gateway.pipeline.incoming == []


def rejecting(request: Incoming) -> None:
    error = common_pb2.Error(
        code=common_pb2.ErrorCode.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED, message="600 tokens are too many", param="prompt"
    )
    request.send(request.row("", [], finish=ERROR, error=error))


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_before_the_first_text_has_a_status(gateway: RunningGateway, http: httpx.Client, stream: bool) -> None:
    gateway.pipeline.script = rejecting
    reply = http.post("/v1/completions", content=completion(stream=stream))
    assert reply.status_code == 400
    assert error_of(reply) == {
        "message": "600 tokens are too many",
        "type": "invalid_request_error",
        "param": "prompt",
        "code": "context_length_exceeded",
    }
    assert reply.headers["x-penstock-request-id"] == gateway.pipeline.wait_for()[0].request_id.hex()


def test_an_error_in_a_stream_is_an_event_that_openais_client_raises(gateway: RunningGateway) -> None:
    def script(request: Incoming) -> None:
        request.send(request.row("some"))
        request.send(request.row("", [], finish=CANCELLED))

    gateway.pipeline.script = script
    with openai.OpenAI(base_url=gateway.url + "/v1", api_key="none", max_retries=0) as client:
        stream = client.completions.create(model="tiny", prompt="x", stream=True)
        assert next(stream).choices[0].text == "some"
        with pytest.raises(openai.APIError, match="was cancelled") as caught:
            next(stream)
    assert caught.value.code == "cancelled"
