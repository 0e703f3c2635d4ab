"""Beam search as bodies and gRPC calls ask for it, and what is refused beside it."""

from typing import Any

import msgspec
import pytest
from known_models import CALLING, Known

from contract.domain.beams import BeamSearch
from contract.domain.errors import ErrorCode, PenstockError
from contract.domain.generation_defaults import GenerationDefaults
from contract.domain.params import SamplingParams
from contract.v1 import inference_pb2, requests_pb2
from contract.wire.requests import decode_params, encode_params
from gateway_svc.core.anthropic.parse import parse_message
from gateway_svc.core.openai import parse_chat, parse_completion
from gateway_svc.core.responses.parse import parse_response
from gateway_svc.wire.clients import decode_generate

DEFAULTS = GenerationDefaults(temperature=0.6, top_p=0.9, repetition_penalty=1.1, max_tokens=300)


class _Drawing(Known):
    """Models whose makers chose how tokens are drawn."""

    def defaults(self, name: str) -> GenerationDefaults:
        del name
        return DEFAULTS


def completion(**fields: Any) -> SamplingParams:
    body = {"prompt": "x", "use_beam_search": True, **fields}
    return parse_completion(msgspec.json.encode(body), lambda _: DEFAULTS).params


def test_of_the_models_defaults_only_max_tokens_holds() -> None:
    params = completion(n=4, length_penalty=0.5, early_stopping="never")
    assert params.beams == BeamSearch(0.5, "never")
    assert (params.n, params.temperature, params.top_p, params.repetition_penalty) == (4, 1.0, 1.0, 1.0)
    assert params.max_tokens == 300
    assert completion(use_beam_search=False).temperature == 0.6


def test_a_chat_has_the_same_fields() -> None:
    said = {"role": "user", "content": "x"}
    body = {"messages": [said], "use_beam_search": True, "n": 2, "temperature": 0, "early_stopping": True}
    assert parse_chat(msgspec.json.encode(body)).params.beams == BeamSearch(1.0, True)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.5},
        {"top_p": 0.5},
        {"top_k": 3},
        {"min_p": 0.1},
        {"repetition_penalty": 1.5},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"logit_bias": {"3": 1}},
        {"logprobs": 0},
        {"prompt_logprobs": 1},
        {"suppress_tokens": [1]},
        {"allowed_token_ids": [1]},
        {"bad_words": ["a"]},
        {"stop": ["a"]},
        {"structured_outputs": {"regex": "a"}},
        {"thinking_token_budget": 4},
        {"repetition_detection": {"max_pattern_size": 3, "min_count": 2}},
        {"n": 17},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_changes_logits_tells_them_or_needs_text_is_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(PenstockError) as refused:
        completion(**fields)
    assert (refused.value.code, refused.value.param) == (ErrorCode.INVALID_ARGUMENT, next(iter(fields)))


@pytest.mark.parametrize("early", [False, True, "never"])
def test_the_contract_carries_a_search(early: bool | str) -> None:
    params = SamplingParams(n=3, use_beam_search=True, length_penalty=0.6, early_stopping=early)
    assert decode_params(encode_params(params)) == params
    call = inference_pb2.GenerateCall(request=encode_params(params))
    call.request.token_ids.ids = b"\1\0\0\0"
    assert decode_generate(call, _Drawing()).params == params


def test_a_call_over_grpc_that_says_nothing_of_a_search_gets_the_defaults_of_one() -> None:
    message = requests_pb2.GenerateRequest(beams=requests_pb2.BeamParameters())
    assert decode_params(message).beams == BeamSearch()
    message.beams.early_stopping = 7  # type: ignore[assignment]
    with pytest.raises(PenstockError) as refused:
        decode_params(message)
    assert refused.value.param == "early_stopping"


@pytest.mark.parametrize("parse", [parse_response, parse_message])
@pytest.mark.parametrize("fields", [{"use_beam_search": True}, {"length_penalty": 0.5}, {"early_stopping": "never"}])
def test_apis_that_tell_one_output_refuse_it(parse: Any, fields: dict[str, Any]) -> None:
    body = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "x"}]}
    if parse is parse_response:
        body = {"input": "x"}
    with pytest.raises(PenstockError) as refused:
        parse(msgspec.json.encode({**body, **fields}), CALLING)
    assert (refused.value.code, refused.value.param) == (ErrorCode.UNIMPLEMENTED, next(iter(fields)))
