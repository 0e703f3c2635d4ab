"""Bodies of `POST /v1/responses`, as the chats that they are."""

import json
from typing import Any

import pytest
from known_models import CALLING, Known

from contract.domain.errors import PenstockError
from gateway_svc.core.ask import Ask, Form
from gateway_svc.core.formats.reading import OutputReading
from gateway_svc.core.responses.parse import MAX_REPEATED_BYTES, parse_response

TOOL: dict[str, Any] = {"type": "function", "name": "look", "parameters": {"type": "object"}}


def parse(models: Known = CALLING, **body: Any) -> Ask:
    return parse_response(json.dumps({"input": "hi"} | body).encode(), models)


def messages(ask: Ask) -> list[dict[str, Any]]:
    assert ask.prompts[0].messages is not None
    return [{"role": each.role, "content": each.content, **(each.extra or {})} for each in ask.prompts[0].messages]


def test_a_text_is_what_the_user_says_after_the_instructions() -> None:
    ask = parse(Known(), instructions="be kind", max_output_tokens=7)
    assert messages(ask) == [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    assert (ask.form, ask.params.max_tokens, ask.reading) == (Form.RESPONSE, 7, OutputReading())


def test_thoughts_words_and_calls_of_one_turn_are_one_message() -> None:
    ask = parse(
        input=[
            {"role": "developer", "content": "tools first"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "look"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
            {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"},
            {"type": "function_call", "call_id": "b", "name": "look", "arguments": "{}", "id": "fc_1"},
            {"type": "function_call_output", "call_id": "a", "output": "fog"},
            {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "rain"}]},
            {"type": "message", "role": "assistant", "content": "Fog."},
            {"type": "message", "role": "assistant", "content": "And rain."},
        ]
    )
    calls = [{"id": each, "type": "function", "function": {"name": "look", "arguments": "{}"}} for each in "ab"]
    (said,) = ({"type": "text", "text": "I look."},)
    assert messages(ask) == [
        {"role": "developer", "content": "tools first"},
        {"role": "user", "content": ({"type": "text", "text": "look"},)},
        {"role": "assistant", "content": (said,), "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "content": "fog", "tool_call_id": "a"},
        {"role": "tool", "content": ({"type": "text", "text": "rain"},), "tool_call_id": "b"},
        {"role": "assistant", "content": "Fog."},
        {"role": "assistant", "content": "And rain."},
    ]


def test_functions_are_given_to_the_template_as_chats_have_them() -> None:
    ask = parse(tools=[{**TOOL, "strict": None, "description": "d"}], tool_choice="auto")
    given = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}, "description": "d"}}]
    assert ask.prompts[0].chat_template_kwargs == {"tools": given}
    assert "tools" in ask.prompts[0].required_variables
    assert ask.params.structured_outputs is None


@pytest.mark.parametrize(
    "more", [{"tool_choice": "required"}, {"tool_choice": {"type": "function", "name": "look"}},
             {"parallel_tool_calls": False}]
)  # fmt: skip
def test_what_must_hold_of_calls_is_a_grammar(more: dict[str, Any]) -> None:
    assert parse(tools=[TOOL], **more).params.structured_outputs is not None


def test_the_form_of_the_text_is_that_of_the_output() -> None:
    schema = {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}
    form = parse(Known(), text={"format": schema}).params.structured_outputs
    assert form is not None
    assert form.said == "json"


def test_effort_is_for_the_template() -> None:
    ask = parse(reasoning={"effort": "high", "summary": "auto"})
    assert ask.prompts[0].chat_template_kwargs == {"reasoning_effort": "high"}
    assert ask.prompts[0].required_variables == ("reasoning_effort",)


def test_what_a_reply_repeats_is_kept_with_it_within_bounds() -> None:
    told = json.loads(parse(tools=[TOOL], instructions="be kind", metadata={"a": "b"}, temperature=0.5).context)
    assert told["tools"] == [{**TOOL, "description": None, "strict": False}]
    assert (told["instructions"], told["metadata"], told["temperature"]) == ("be kind", {"a": "b"}, 0.5)
    large = json.loads(parse(tools=[TOOL], instructions="x" * MAX_REPEATED_BYTES).context)
    assert (large["tools"], large["instructions"], large["tool_choice"]) == ([], None, "auto")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": None}, "input"),
        ({"input": [7]}, "input[0]"),
        ({"input": []}, "input"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
         "input[0].content[0].type"),
        ({"input": [{"type": "item_reference", "id": "i"}]}, "input[0]"),
        ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}, "input[0].encrypted_content"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "f"}]}, "input[0].arguments"),
        ({"input": [{"type": "web_search_call", "id": "a"}]}, "input[0].type"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{**TOOL, "shape": 1}]}, "tools[0].shape"),
        ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
        ({"reasoning": {"effort": "high", "mode": "pro"}}, "reasoning.mode"),
        ({"reasoning": {"speed": 1}}, "reasoning"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"include": ["computer_call_output.output.image_url"]}, "include"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_output_tokens": -1}, "max_output_tokens"),
        ({"max_tokens": 1}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"n": 2}, "n"),
        ({"truncation": "auto"}, "truncation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"conversation": "c"}, "conversation"),
    ],
)  # fmt: skip
def test_what_is_wrong_or_not_there_is_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(PenstockError) as refused:
        parse(**body)
    assert (refused.value.kind.http_status, refused.value.param) == (400, param)
