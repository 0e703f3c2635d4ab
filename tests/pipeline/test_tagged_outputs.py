"""Structural tags with a `format` through all services: as OpenAI's and vLLM's clients ask for them."""

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from byte_tokenizer import write_byte_model
from in_memory import Pipeline

from penstock import SamplingParams, StructuredOutputsParams
from penstock.outputs import CompletionOutput

FORMAT = {
    "type": "sequence",
    "elements": [
        {"type": "tag", "begin": "<think>", "content": {"type": "regex", "pattern": "[a-c]{1,20}"}, "end": "</think>"},
        {
            "type": "tags_with_separator",
            "tags": [
                {
                    "begin": "<f=add>",
                    "content": {
                        "type": "json_schema",
                        "json_schema": {"type": "array", "items": {"enum": [1, 22]}, "minItems": 2, "maxItems": 4},
                    },
                    "end": "</f>",
                },
                {"begin": "<f=", "content": {"type": "or", "elements": [
                    {"type": "const_string", "value": "stop>"}, {"type": "const_string", "value": "go>"},
                ]}, "end": "</f>"},
            ],
            "separator": ", ",
            "at_least_one": True,
        },
        {"type": "const_string", "value": "."},
    ],
}  # fmt: skip
NUMBERS = r"\[\s*(1|22)(\s*,\s*(1|22)){1,3}\s*\]"
CALL = rf"<f=(add>{NUMBERS}|stop>|go>)</f>"
WHOLE = re.compile(rf"<think>[a-c]{{1,20}}</think>{CALL}(, {CALL})*\.")


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    model = tmp_path_factory.mktemp("tags")
    write_byte_model(model, chats=True)
    with Pipeline(model, worker={"runner": "simulated", "step_ms": 0.5}) as pipeline:
        yield pipeline


def chat(pipeline: Pipeline, **fields: Any) -> httpx.Response:
    url = f"http://127.0.0.1:{pipeline.gateway.http_port}/v1/chat/completions"
    body = {"messages": [{"role": "user", "content": "go"}], "max_tokens": 450, **fields}
    return httpx.post(url, json=body, timeout=240)


def test_outputs_have_the_format(pipeline: Pipeline) -> None:
    tag = {"type": "structural_tag", "format": FORMAT}
    forms: list[dict[str, Any]] = [
        {"response_format": tag},
        {"structured_outputs": {"structural_tag": json.dumps(tag)}},
    ]
    choices = [chat(pipeline, seed=seed, n=4, **forms[seed % 2]).json()["choices"] for seed in range(4)]
    whole = [each["message"]["content"] for several in choices for each in several if each["finish_reason"] == "stop"]
    assert len(whole) > 4
    assert [text for text in whole if not WHOLE.fullmatch(text)] == []


def test_over_grpc_too(pipeline: Pipeline) -> None:
    params = SamplingParams(
        seed=3,
        n=4,
        max_tokens=450,
        structured_outputs=StructuredOutputsParams(structural_tag=json.dumps({"format": FORMAT})),
    )
    outputs: list[CompletionOutput] = pipeline.client.complete("go", params).outputs
    assert {bool(WHOLE.fullmatch(each.text)) for each in outputs if each.finish_reason == "stop"} == {True}


@pytest.mark.parametrize(
    ("tag", "told"),
    [
        ({"format": {"type": "token", "token": 7}}, "response_format: format: type 'token' is not done"),
        ({"format": {"type": "any_text"}, "triggers": ["a"]}, "response_format has no field 'triggers'"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(pipeline: Pipeline, tag: dict[str, Any], told: str) -> None:
    reply = chat(pipeline, response_format={"type": "structural_tag", **tag})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "response_format")
    assert told in reply.json()["error"]["message"]
