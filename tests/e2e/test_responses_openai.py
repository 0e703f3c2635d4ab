"""Responses as the real `openai` package asks for them."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel
from served import Served

PLACE = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [{"type": "function", "name": "look", "parameters": PLACE, "strict": True}]


@pytest.fixture(scope="module")
def client(agents: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{agents.http_urls[1]}/v1", api_key="none", max_retries=0, timeout=900) as client:
        yield client


def test_a_text_is_answered(client: openai.OpenAI) -> None:
    reply = client.responses.create(model="simulated", input="greet me", instructions="be kind", metadata={"a": "b"})
    assert (reply.status, reply.output_text, reply.error) == ("completed", "Hello, you.", None)
    assert (reply.instructions, reply.metadata, reply.store) == ("be kind", {"a": "b"}, False)  # type: ignore[attr-defined]
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.input_tokens + reply.usage.output_tokens
    again = client.responses.create(model="simulated", input="greet me", instructions="be kind")
    assert again.usage is not None
    assert 0 < again.usage.input_tokens_details.cached_tokens < again.usage.input_tokens


def test_a_reply_that_is_cut_is_incomplete(client: openai.OpenAI) -> None:
    reply = client.responses.create(model="simulated", input="greet me", max_output_tokens=5)
    assert (reply.status, reply.output_text) == ("incomplete", "Hello")
    assert reply.incomplete_details is not None
    assert reply.incomplete_details.reason == "max_output_tokens"


def test_a_stream_is_put_together_by_the_package(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "simulated", "input": "compare them", "tools": [_loose(TOOLS[0])]}
    with client.responses.stream(**asked) as stream:
        events = list(stream)
        told = stream.get_final_response()
    numbers = [event.sequence_number for event in events]
    assert numbers == sorted(set(numbers))
    assert [event.type for event in events][:2] == ["response.created", "response.in_progress"]
    assert {each.type for each in events} >= {
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.output_text.delta",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.completed",
    }
    assert [each.type for each in told.output] == ["reasoning", "message", "function_call"]
    whole = client.responses.create(**asked)
    assert [_without_ids(each) for each in told.output] == [_without_ids(each) for each in whole.output]
    assert whole.usage is not None
    assert whole.usage.output_tokens_details.reasoning_tokens > 100


def test_functions_are_called_until_there_is_an_answer(client: openai.OpenAI) -> None:
    weather = {"Oslo": "cold in Oslo", "Rome": "warm in Rome"}
    conversation: list[Any] = [{"role": "user", "content": "compare them"}]
    asked: list[str] = []
    while True:
        reply = client.responses.create(model="simulated", input=conversation, tools=[_loose(TOOLS[0])])
        calls = [each for each in reply.output if each.type == "function_call"]
        conversation += [each.to_dict() for each in reply.output]
        for call in calls:
            asked.append(json.loads(call.arguments)["city"])
            conversation.append({"type": "function_call_output", "call_id": call.call_id, "output": weather[asked[-1]]})
        if not calls:
            break
    assert asked == ["Oslo", "Rome"]
    assert reply.output_text == "Oslo is cold, Rome is warm."


def test_a_function_that_must_be_called_is_called_as_its_schema_says(client: openai.OpenAI) -> None:
    for choice in ("required", {"type": "function", "name": "look"}):
        reply = client.responses.create(
            model="simulated",
            input="hm",
            tools=TOOLS,
            tool_choice=choice,  # type: ignore[arg-type]
            parallel_tool_calls=False,
            extra_body={"seed": 3},
        )
        (call,) = (each for each in reply.output if each.type != "reasoning")
        assert call.type == "function_call"
        assert json.loads(call.arguments)["city"] in ("Oslo", "Rome")
        assert reply.tools[0].strict is True  # type: ignore[union-attr]


class Place(BaseModel):
    city: str
    days: int


def test_a_form_is_parsed(client: openai.OpenAI) -> None:
    reply = client.responses.parse(model="simulated", input="hm", text_format=Place, extra_body={"seed": 1})
    assert reply.status == "completed", reply
    assert isinstance(reply.output_parsed, Place)


def test_logprobs_are_told_of_the_answer_alone(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    reply = client.responses.create(model="simulated", input="compare them", tools=[_loose(TOOLS[0])], **asked)
    message = next(each for each in reply.output if each.type == "message")
    (content,) = message.content
    assert content.type == "output_text"
    assert content.logprobs is not None
    assert "".join(each.token for each in content.logprobs) == content.text == "Let me see."
    assert {len(each.top_logprobs) for each in content.logprobs} == {2}


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
         "input[0].content[0].type"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.json_schema.schema"),
    ],
)  # fmt: skip
def test_what_is_not_done_is_refused_by_name(client: openai.OpenAI, more: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**({"model": "simulated", "input": "hm"} | more))
    assert refused.value.param == param


def _loose(tool: dict[str, Any]) -> Any:
    return {**tool, "strict": False}


def _without_ids(item: Any) -> dict[str, Any]:
    fields = item.to_dict()
    for name in ("id", "call_id", "parsed_arguments"):
        fields.pop(name, None)
    for part in fields.get("content", ()):
        part.pop("parsed", None)
    return fields  # type: ignore[no-any-return]
