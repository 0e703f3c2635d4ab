"""Bodies of calls that need a vocabulary, and their answers."""

import json
from typing import Any

import numpy as np
import pytest

from contract.domain.errors import ErrorCode, PenstockError
from contract.domain.request import Message
from gateway_svc.core.vocabulary import (
    Tokenized,
    detokenize_reply,
    parse_detokenize,
    parse_tokenize,
    refused_vocabulary_field,
    tokenize_reply,
)

HI = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def body(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def refused(parse: Any, **fields: Any) -> PenstockError:
    with pytest.raises(PenstockError) as caught:
        parse(body(**fields))
    return caught.value


def test_a_text_gets_the_tokenizers_special_tokens_unless_it_says_otherwise() -> None:
    ask = parse_tokenize(body(model="m", prompt="hi"))
    assert (ask.model, ask.prompt.text, ask.add_special_tokens, ask.wants_strings) == ("m", "hi", True, False)
    assert parse_tokenize(body(prompt="", add_special_tokens=False, return_token_strs=True)).wants_strings
    assert not parse_tokenize(body(prompt="", add_special_tokens=False)).add_special_tokens


def test_a_chat_gets_none_unless_it_says_so_and_its_template_gets_the_tools() -> None:
    ask = parse_tokenize(body(messages=HI, tools=TOOLS, add_generation_prompt=False))
    assert ask.prompt.messages == (Message("user", "hi"),)
    assert ask.prompt.chat_template_kwargs == {"tools": TOOLS, "add_generation_prompt": False}
    assert not ask.add_special_tokens
    assert parse_tokenize(body(messages=HI, add_special_tokens=True)).add_special_tokens


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "hi", "messages": HI}, "prompt"),
        ({"prompt": 7}, "prompt"),
        ({"prompt": "hi", "tools": TOOLS}, "tools"),
        ({"prompt": "hi", "add_generation_prompt": True}, "add_generation_prompt"),
        ({"messages": []}, "messages"),
        ({"messages": HI, "tools": TOOLS, "chat_template_kwargs": {"tools": []}}, "tools"),
        ({"messages": HI, "add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        ({"messages": HI, "mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs"),
    ],
)
def test_what_cannot_be_tokenized_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    assert refused(parse_tokenize, **fields).param == param


@pytest.mark.parametrize("tokens", [None, [-1], [2**32], ["7"], 7])
def test_what_are_no_tokens_is_refused_by_name(tokens: Any) -> None:
    assert (refused(parse_detokenize, tokens=tokens).param or "").startswith("tokens")


def test_a_body_that_is_no_object_is_refused() -> None:
    for parse in (parse_tokenize, parse_detokenize):
        with pytest.raises(PenstockError):
            parse(b"[]")


def test_a_field_that_nobody_knows_is_told_or_refused_with_the_nearest_name() -> None:
    assert refused_vocabulary_field(parse_tokenize(body(prompt="hi"))) is None
    ask = parse_tokenize(body(prompt="hi", return_token_str=True))
    assert ask.ignored_fields == ("return_token_str",)
    refusal = refused_vocabulary_field(ask)
    assert refusal is not None
    assert "return_token_strs" in refusal.message
    other = refused_vocabulary_field(parse_detokenize(body(tokens=[], token=1)))
    assert other is not None
    assert other.code is ErrorCode.INVALID_ARGUMENT


def test_the_answers_are_vllms() -> None:
    ids = np.array([3, 4], np.uint32)
    assert json.loads(tokenize_reply(Tokenized(ids, 64))) == {
        "count": 2,
        "max_model_len": 64,
        "tokens": [3, 4],
        "token_strs": None,
    }
    assert json.loads(tokenize_reply(Tokenized(ids, 64, ["a", "b"])))["token_strs"] == ["a", "b"]
    assert json.loads(detokenize_reply("hi")) == {"prompt": "hi"}
