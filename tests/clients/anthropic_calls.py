"""Calls of the `anthropic` package, as people make them, against the script of `scripted_agents`."""

import json
import sys
from typing import Any

import anthropic
from pydantic import BaseModel

URL, MODEL = sys.argv[1:3]
TOOL: Any = {
    "name": "look",
    "description": "the weather of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
WEATHER = {"Oslo": "cold in Oslo", "Rome": "warm in Rome"}
client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0, timeout=900)


def ask(text: str, **more: Any) -> anthropic.types.Message:
    """One question."""
    return client.messages.create(**{"model": MODEL, "max_tokens": 2000, "messages": said(text)} | more)


def said(text: str) -> Any:
    """The messages of one question."""
    return [{"role": "user", "content": text}]


def check_texts() -> None:
    """A text is answered, cut and stopped."""
    whole = ask("greet me", system="be kind")
    assert [each.text for each in whole.content] == ["Hello, you."], whole
    assert (whole.stop_reason, whole.stop_sequence) == ("end_turn", None)
    assert whole.id == f"msg_{whole._request_id}"
    assert whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0) > 10
    cut = ask("greet me", max_tokens=5)
    assert (cut.content[0].text, cut.stop_reason, cut.usage.output_tokens) == ("Hello", "max_tokens", 5)
    stopped = ask("greet me", stop_sequences=[", y"])
    assert (stopped.content[0].text, stopped.stop_reason, stopped.stop_sequence) == ("Hello", "stop_sequence", ", y")
    begun = client.messages.create(
        model=MODEL, max_tokens=50, messages=[*said("greet me"), {"role": "assistant", "content": "Well"}]
    )
    assert begun.content[0].text == "Hello, you."


def check_stream() -> None:
    """The package puts a stream together to what a plain reply says."""
    question: Any = {"model": MODEL, "max_tokens": 2000, "messages": said("compare them"), "tools": [TOOL]}
    with client.messages.stream(**question) as stream:
        kinds = {event.type for event in stream}
        told = stream.get_final_message()
    assert kinds >= {"text", "thinking", "signature", "input_json", "content_block_stop", "message_stop"}, kinds
    whole = client.messages.create(**question)
    assert (
        [each.type for each in told.content]
        == ["thinking", "text", "tool_use"]
        == [each.type for each in whole.content]
    )
    assert told.content[0].thinking == whole.content[0].thinking
    assert told.content[0].signature
    assert whole.content[0].signature
    assert told.content[1].text == whole.content[1].text == "Let me see."
    assert told.content[2].input == whole.content[2].input == {"city": "Oslo"}
    assert told.stop_reason == whole.stop_reason == "tool_use"
    assert told.usage.output_tokens == whole.usage.output_tokens > 300
    sums = [each.usage.input_tokens + (each.usage.cache_read_input_tokens or 0) for each in (told, whole)]
    assert sums[0] == sums[1] > 10


def check_tools() -> None:
    """Functions are called until there is an answer."""
    messages, asked = said("compare them"), []
    while True:
        reply = client.messages.create(model=MODEL, max_tokens=2000, messages=messages, tools=[TOOL])
        messages.append({"role": "assistant", "content": reply.content})
        results = []
        for block in reply.content:
            if block.type == "tool_use":
                asked.append(block.input["city"])
                results.append({"type": "tool_result", "tool_use_id": block.id, "content": WEATHER[asked[-1]]})
        if not results:
            break
        messages.append({"role": "user", "content": results})
    assert asked == ["Oslo", "Rome"], asked
    assert (reply.content[-1].text, reply.stop_reason) == ("Oslo is cold, Rome is warm.", "end_turn")
    forced = ask("hm", tools=[TOOL], tool_choice={"type": "any", "disable_parallel_tool_use": True})
    assert [each.input["city"] in WEATHER for each in forced.content if each.type == "tool_use"] == [True], forced


class Place(BaseModel):
    """A form of the output."""

    city: str
    days: int


def check_form() -> None:
    """What is parsed has the form."""
    reply = client.messages.parse(
        model=MODEL, max_tokens=4000, messages=said("hm"), output_format=Place, extra_body={"seed": 1}
    )
    assert isinstance(reply.parsed_output, Place), reply


def check_count() -> None:
    """Tokens are counted as they are computed."""
    counted = client.messages.count_tokens(model=MODEL, messages=said("greet me"), system="be kind", tools=[TOOL])
    used = ask("greet me", system="be kind", tools=[TOOL]).usage
    assert counted.input_tokens == used.input_tokens + (used.cache_read_input_tokens or 0)


def check_errors() -> None:
    """Errors are of the package's classes, with bodies of its shape."""
    image: Any = [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]
    for kind, status, more in (
        (anthropic.BadRequestError, 400, {"messages": image}),
        (anthropic.BadRequestError, 400, {"tools": [{"type": "bash_20250124", "name": "bash"}]}),
        (anthropic.BadRequestError, 400, {"thinking": {"type": "between_tools"}}),
        (anthropic.BadRequestError, 400, {"messages": said("x" * 9000)}),
    ):
        try:
            ask("hm", **more)
        except kind as error:
            assert (error.status_code, error.body["type"]) == (status, "error"), error.body
            assert error.body["error"]["type"] == "invalid_request_error", error.body
        else:
            raise AssertionError(f"{json.dumps(more):.100} was taken")

    try:
        ask("hm", model="another")
    except anthropic.NotFoundError as error:
        assert error.body["error"]["type"] == "not_found_error", error.body
    else:
        raise AssertionError("a model that is not there answered")


for check in (check_texts, check_stream, check_tools, check_form, check_count, check_errors):
    check()
