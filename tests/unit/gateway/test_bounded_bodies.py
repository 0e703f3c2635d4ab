"""Fields of bodies that bound an output."""

import json
from typing import Any

import pytest
from known_models import CALLING

from contract.domain.errors import ErrorCode, PenstockError
from contract.domain.params import SamplingParams
from contract.domain.repetition import RepetitionDetectionParams
from contract.wire.requests import decode_params, encode_params
from gateway_svc.core.anthropic.parse import parse_message
from gateway_svc.core.openai import parse_chat, parse_completion
from gateway_svc.core.pooled.parse import parse_embedding
from gateway_svc.core.responses.parse import parse_response
from gateway_svc.core.vocabulary import parse_tokenize


def params(**body: Any) -> SamplingParams:
    return parse_completion(json.dumps({"prompt": "p", **body}).encode()).params


def test_a_repetition_that_ends_an_output_is_an_object() -> None:
    said = {"max_pattern_size": 4, "min_count": 3, "min_pattern_size": None}
    found = params(repetition_detection=said, thinking_token_budget=0, detokenize=False)
    assert found.repetition_detection == RepetitionDetectionParams(max_pattern_size=4, min_count=3)
    assert (found.thinking_token_budget, found.detokenize) == (0, False)
    assert decode_params(encode_params(found)) == found


@pytest.mark.parametrize(("wrong", "param"), [({"size": 2}, ""), ({"max_pattern_size": "2"}, ".max_pattern_size")])
def test_a_repetition_that_is_none_is_refused_by_name(wrong: dict[str, Any], param: str) -> None:
    with pytest.raises(PenstockError) as caught:
        params(repetition_detection=wrong)
    assert caught.value.param == f"repetition_detection{param}"


def test_functions_cannot_be_called_in_an_output_without_text() -> None:
    tool = {"type": "function", "function": {"name": "look"}}
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": [tool], "detokenize": False}
    with pytest.raises(PenstockError, match="tools need detokenize") as caught:
        parse_chat(json.dumps(body).encode(), CALLING.defaults, CALLING.formats)
    assert caught.value.param == "detokenize"


@pytest.mark.parametrize("empty", [{}, {"max_pattern_size": 0}])
def test_a_repetition_of_nothing_ends_nothing(empty: dict[str, int]) -> None:
    assert params(repetition_detection=empty).stopping.repetition_detection is None


USER = {"role": "user", "content": "a"}
OTHER_APIS = {
    "response": (lambda body: parse_response(body, CALLING), {"input": "hi"}),
    "message": (lambda body: parse_message(body, CALLING), {"max_tokens": 9, "messages": [USER]}),
    "embedding": (lambda body: parse_embedding(body, CALLING), {"input": "hi"}),
    "tokenize": (parse_tokenize, {"prompt": "hi"}),
}  # fmt: skip


@pytest.mark.parametrize("api", OTHER_APIS)
@pytest.mark.parametrize(
    ("name", "asked", "nothing"),
    [
        ("guided_json", {"type": "object"}, None),
        ("echo", True, False),
        ("prompt_logprobs", 1, None),
        ("stream_interval", 4, None),
    ],
)
def test_what_chats_know_and_another_api_does_not_is_refused_by_name(
    api: str, name: str, asked: Any, nothing: Any
) -> None:
    parse, body = OTHER_APIS[api]
    parse(json.dumps(body | {name: nothing}).encode())
    with pytest.raises(PenstockError) as caught:
        parse(json.dumps(body | {name: asked}).encode())
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID_ARGUMENT, name)
