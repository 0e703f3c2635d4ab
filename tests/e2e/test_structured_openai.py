"""Structured outputs as the real `openai` package asks for them, also while processes are killed."""

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel, Field
from served import Served

CHAT: list[ChatCompletionMessageParam] = [{"role": "user", "content": "who?"}]
COUNTED = {"type": "json_schema", "json_schema": {"name": "counted", "schema": {
    "type": "object",
    "properties": {"numbers": {"type": "array", "items": {"type": "integer"}, "minItems": 150, "maxItems": 200}},
    "required": ["numbers"],
    "additionalProperties": False,
}}}  # fmt: skip


class Person(BaseModel):
    name: str = Field(max_length=10)
    kind: Literal["cat", "dog"]
    ages: list[int] = Field(max_length=4)


@pytest.fixture(scope="module")
def client(simulated: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{simulated.http_url}/v1", api_key="none", max_retries=0, timeout=900) as client:
        yield client


def test_parse_gives_the_object_that_was_described(client: openai.OpenAI) -> None:
    for seed in range(4):
        reply = client.chat.completions.parse(
            model="simulated", messages=CHAT, response_format=Person, seed=seed, max_tokens=600
        )
        (choice,) = reply.choices
        assert choice.finish_reason == "stop"
        assert isinstance(choice.message.parsed, Person)


def test_a_stream_is_parsed_as_it_comes(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="simulated", messages=CHAT, response_format=Person, seed=9, max_tokens=600
    ) as stream:
        events = [event.type for event in stream]
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Person)
    assert events.count("content.delta") > 5


def test_what_is_cut_says_so(client: openai.OpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model="simulated", messages=CHAT, response_format=Person, max_tokens=3)


@pytest.mark.parametrize(
    ("extra", "pattern"),
    [
        ({"structured_outputs": {"choice": ["alpha", "beta"]}}, {"alpha", "beta"}),
        ({"guided_choice": ["gamma", "delta"]}, {"gamma", "delta"}),
        ({"structured_outputs": {"regex": "[ab]"}}, {"a", "b"}),
        ({"structured_outputs": {"grammar": 'root ::= "x" | "y"'}}, {"x", "y"}),
    ],
)
def test_vllms_spellings_do_the_same(client: openai.OpenAI, extra: dict[str, object], pattern: set[str]) -> None:
    chat = client.chat.completions.create(model="simulated", messages=CHAT, extra_body=extra)
    assert chat.choices[0].message.content in pattern
    completion = client.completions.create(model="simulated", prompt="a", extra_body=extra)
    assert completion.choices[0].text in pattern


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, "not"),
        ({"structured_outputs": {"regex": "("}}, "unclosed"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "exactly one"),
        ({"response_format": {"type": "yaml"}}, "yaml"),
        ({"structured_outputs": {"regex": "a"}, "min_tokens": 3}, "min_tokens"),
    ],
)
def test_what_cannot_be_done_is_the_callers_fault(
    client: openai.OpenAI, extra: dict[str, object], message: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        client.chat.completions.create(model="simulated", messages=CHAT, extra_body=extra)


@pytest.mark.parametrize("victim", ["worker-0", "scheduler-0", "detokenizer-0"])
def test_an_output_follows_its_schema_through_a_death(simulated: Served, client: openai.OpenAI, victim: str) -> None:
    def text(seed: int, kill: bool = False) -> str:
        found = ""
        for chunk in client.chat.completions.create(  # type: ignore[call-overload]
            model="simulated", messages=CHAT, seed=seed, stream=True, response_format=COUNTED, max_tokens=3000
        ):
            found += chunk.choices[0].delta.content or ""
            if kill and len(found) > 40:
                os.kill(simulated.pids()[victim], signal.SIGKILL)
                kill = False
        assert not kill
        return found

    undisturbed = [text(seed) for seed in range(4)]
    assert all(150 <= len(json.loads(each)["numbers"]) <= 200 for each in undisturbed)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(text, range(4), [True, False, False, False])) == undisturbed
