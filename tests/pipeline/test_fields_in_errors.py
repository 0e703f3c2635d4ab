"""Errors name the field that the caller wrote, at each route and wherever in the pipeline they come from."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from byte_tokenizer import write_byte_model
from in_memory import Pipeline

from contract.domain.errors import PenstockError
from contract.domain.pooling import PoolingParams
from penstock import SamplingParams

ASKED = {"messages": [{"role": "user", "content": "hi"}]}
LONG = "x" * 600  # tokens; the context has 512
LONG_CHAT = {"messages": [{"role": "user", "content": LONG}]}
TOOL: dict[str, Any] = {"type": "function", "name": "look", "parameters": {"type": "object"}}
# The vocabulary cannot follow it, which the tokenizer finds out.
WRONG = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "stringy"}}}
WRONG_TEXT = {"type": "json_schema", "name": "x", "schema": {"type": "stringy"}}

CASES: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"prompt": ""}, "prompt"),
    ("/v1/completions", {"prompt": LONG}, "prompt"),
    ("/v1/completions", {"prompt": "hi", "max_tokens": 900}, "max_tokens"),
    ("/v1/completions", {"prompt": "hi", "response_format": WRONG}, "response_format"),
    ("/v1/completions", {"prompt": "hi", "guided_regex": "("}, "guided_regex"),
    ("/v1/completions", {"prompt": "hi", "guided_json": "{"}, "guided_json"),
    ("/v1/completions", {"prompt": "hi", "structured_outputs": {"regex": "("}}, "structured_outputs"),
    ("/v1/completions", {"prompt": "hi", "echo": True, "logprobs": 90}, "logprobs"),
    ("/v1/completions", {"prompt": "", "echo": True, "return_token_ids": True}, "prompt"),
    ("/v1/chat/completions", ASKED | {"max_completion_tokens": 900}, "max_completion_tokens"),
    ("/v1/chat/completions", ASKED | {"max_completion_tokens": 0}, "max_completion_tokens"),
    ("/v1/chat/completions", ASKED | {"max_tokens": 900}, "max_tokens"),
    ("/v1/chat/completions", ASKED | {"response_format": WRONG}, "response_format"),
    ("/v1/chat/completions", ASKED | {"reasoning_effort": "low"}, "reasoning_effort"),
    ("/v1/chat/completions", LONG_CHAT, "messages"),
    ("/v1/chat/completions/render", ASKED | {"max_completion_tokens": 900}, "max_completion_tokens"),
    ("/v1/chat/completions/render", ASKED | {"response_format": WRONG}, "response_format"),
    ("/v1/responses", {"input": LONG}, "input"),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 900}, "max_output_tokens"),
    ("/v1/responses", {"input": "hi", "reasoning": {"effort": "low"}}, "reasoning.effort"),
    ("/v1/responses", {"input": "hi", "text": {"format": WRONG_TEXT}}, "text.format"),
    ("/v1/responses", {"input": "hi", "tools": [{**TOOL, "name": "a b"}]}, "tools[0].name"),
    ("/v1/responses", {"input": "hi", "structured_outputs": {"regex": "("}}, "structured_outputs"),
    ("/v1/responses", {"input": "hi", "stop": "x", "detokenize": False}, "stop"),
    ("/v1/embeddings", {"input": ""}, "input"),
    ("/v1/embeddings", {"input": ["hi", ""]}, "input"),
    ("/v1/embeddings", {"input": LONG}, "input"),
    ("/v1/embeddings", LONG_CHAT, "messages"),
    ("/v1/embeddings", {"input": "hi", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ("/pooling", {"input": ""}, "input"),
    ("/score", {"text_1": "", "text_2": ["hi", "ho"]}, "text_1"),
    ("/v1/score", {"text_1": "hi", "text_2": ["ho", ""]}, "text_2"),
    ("/v1/score", {"text_1": ["hi", ""], "text_2": ["ho", "hu"]}, "text_1"),
    ("/rerank", {"query": LONG, "documents": ["hi"]}, "query"),
    ("/v1/rerank", {"query": "hi", "documents": ["ho", LONG]}, "documents"),
    ("/v2/rerank", {"query": "hi", "documents": [""]}, "documents"),
    ("/tokenize", ASKED | {"reasoning_effort": "low"}, "reasoning_effort"),
    ("/detokenize", {"tokens": [400]}, "tokens"),
]  # fmt: skip
# What Anthropic's errors say of the field stands in their message.
MESSAGES: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/messages", {"max_tokens": 900}, "max_tokens is 900"),
    ("/v1/messages", {"output_config": {"effort": "low"}}, "does nothing with output_config.effort"),
    ("/v1/messages", {"output_config": {"format": WRONG_TEXT}}, "output_config.format: "),
    ("/v1/messages", {"stop_sequences": ["x"], "detokenize": False}, "stop_sequences needs detokenize"),
    ("/v1/messages", {"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name must be"),
    ("/v1/messages", {"output_config": {"format": {"type": "yaml"}}}, "output_config.format.type must be"),
    ("/v1/messages/count_tokens", {"output_config": {"effort": "low"}}, "does nothing with output_config.effort"),
]


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    model = tmp_path_factory.mktemp("chats")
    write_byte_model(model, chats=True)
    with Pipeline(model, worker={"runner": "simulated"}) as pipeline:
        yield pipeline


def post(pipeline: Pipeline, path: str, body: dict[str, Any]) -> httpx.Response:
    url = f"http://127.0.0.1:{pipeline.gateway.http_port}{path}"
    headers = {"content-type": "application/json"}
    return httpx.post(url, content=json.dumps(body), headers=headers, timeout=300)


@pytest.mark.parametrize(("path", "body", "param"), CASES)
def test_the_param_of_an_error_is_the_callers_field(
    pipeline: Pipeline, path: str, body: dict[str, Any], param: str
) -> None:
    reply = post(pipeline, path, body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text


@pytest.mark.parametrize(("path", "body", "told"), MESSAGES)
def test_the_message_of_an_error_has_the_callers_field(
    pipeline: Pipeline, path: str, body: dict[str, Any], told: str
) -> None:
    reply = post(pipeline, path, ASKED | {"max_tokens": 5} | body)
    assert reply.status_code == 400
    assert told in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("/v1/responses", {"input": "hi", "max_output_tokens": 900}, "max_output_tokens is 900"),
        ("/v1/responses", {"input": "hi", "text": {"format": WRONG_TEXT}}, "text.format: "),
        ("/v1/chat/completions", ASKED | {"response_format": WRONG}, "response_format: "),
        ("/v1/embeddings", {"input": ""}, "the prompt is empty"),
    ],
)  # fmt: skip
def test_so_is_the_name_in_the_message(pipeline: Pipeline, path: str, body: dict[str, Any], told: str) -> None:
    assert told in post(pipeline, path, body).json()["error"]["message"]


def test_an_event_stream_and_the_page_of_a_request_tell_the_same(pipeline: Pipeline) -> None:
    body = {"input": "hi", "max_output_tokens": 900, "stream": True}
    reply = post(pipeline, "/v1/responses", body)
    assert reply.json()["error"]["param"] == "max_output_tokens"
    request_id = reply.headers["x-penstock-request-id"]
    page = httpx.get(f"http://127.0.0.1:{pipeline.gateway.http_port}/v1/requests/{request_id}", timeout=300).json()
    assert page["error"]["param"] == "max_output_tokens"


def test_over_grpc_it_is_the_field_of_the_call(pipeline: Pipeline) -> None:
    with pytest.raises(PenstockError) as refused:
        list(pipeline.client.generate("", SamplingParams(max_tokens=1)))
    assert refused.value.param == "text"
    with pytest.raises(PenstockError) as refused:
        list(pipeline.client.generate("hi", SamplingParams(max_tokens=900)))
    assert refused.value.param == "max_tokens"
    with pytest.raises(PenstockError) as refused:
        pipeline.client.embed("")
    assert refused.value.param == "text"
    with pytest.raises(PenstockError) as refused:
        pipeline.client.embed("hi", PoolingParams(pooling_type="LAST", dimensions=4096))
    assert refused.value.param == "dimensions"
    with pytest.raises(PenstockError) as refused:
        pipeline.client.detokenize([400])
    assert refused.value.param == "token_ids"
