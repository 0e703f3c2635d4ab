"""Fields of a chat that are for its template: they become its variables, and those that a template must read say so."""

import json
from typing import Any

import pytest

from contract.domain.errors import PenstockError
from contract.v1 import requests_pb2
from gateway_svc.core.openai import parse_chat
from gateway_svc.wire.requests import encode_prompt
from tokenizer_svc.wire import chat_prompt


def prompt_of(**fields: Any) -> Any:
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    return parse_chat(json.dumps(body).encode()).prompts[0]


def test_documents_and_efforts_must_be_read_by_the_template() -> None:
    prompt = prompt_of(documents=[{"text": "a"}], reasoning_effort="high", chat_template_kwargs={"other": 1})
    assert prompt.chat_template_kwargs == {"other": 1, "documents": [{"text": "a"}], "reasoning_effort": "high"}
    assert prompt.required_variables == ("documents", "reasoning_effort")
    assert chat_prompt(requests_pb2.GenerateRequest.FromString(encode_prompt(prompt)).messages) == prompt


def test_variables_given_as_such_may_go_unread() -> None:
    prompt = prompt_of(chat_template_kwargs={"documents": [{"text": "a"}], "reasoning_effort": "high"})
    assert prompt.required_variables == ()
    assert prompt_of(documents=[]).required_variables == ()


def test_two_different_efforts_contradict_each_other() -> None:
    with pytest.raises(PenstockError, match="contradict"):
        prompt_of(reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "high"})
