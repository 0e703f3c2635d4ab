"""Fields of bodies that bound an output."""

import json
from typing import Any

import pytest
from known_models import CALLING

from contract.domain.errors import PenstockError
from contract.domain.params import SamplingParams
from contract.domain.repetition import RepetitionDetectionParams
from contract.wire.requests import decode_params, encode_params
from gateway_svc.core.openai import parse_chat, parse_completion


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
