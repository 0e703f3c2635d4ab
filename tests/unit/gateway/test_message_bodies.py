"""Bodies of `POST /v1/messages`, as the chats that they are."""

import json
from dataclasses import replace
from typing import Any

import pytest
from known_models import CALLING, Known
from told_chats import FACTS

from contract.domain.chat_facts import ChatFacts
from contract.domain.errors import ErrorCode, PenstockError
from gateway_svc.core.anthropic.count import parse_count
from gateway_svc.core.anthropic.errors import message_error_fields
from gateway_svc.core.anthropic.parse import parse_message
from gateway_svc.core.ask import Ask, Form
from gateway_svc.core.formats.choice import choose_formats
from gateway_svc.core.formats.reading import OutputReading

TOOL: dict[str, Any] = {"name": "look", "input_schema": {"type": "object"}}
ASKED = {"max_tokens": 9000, "messages": [{"role": "user", "content": "hi"}]}
THINKING_ALWAYS = Known(choose_formats(replace(FACTS, switches=frozenset()), "auto", "auto"))


def parse(models: Known = CALLING, **body: Any) -> Ask:
    return parse_message(json.dumps(ASKED | body).encode(), models)


def messages(ask: Ask) -> list[dict[str, Any]]:
    assert ask.prompts[0].messages is not None
    return [{"role": each.role, "content": each.content, **(each.extra or {})} for each in ask.prompts[0].messages]


def text(said: str) -> tuple[dict[str, str], ...]:
    return ({"type": "text", "text": said},)


def test_a_text_is_what_the_user_says_after_the_system() -> None:
    hint = {"cache_control": {"type": "ephemeral"}}
    ask = parse(Known(), system=[{"type": "text", "text": "be kind", **hint}], stop_sequences=["x"], top_k=3, **hint)
    assert messages(ask) == [{"role": "system", "content": text("be kind")}, {"role": "user", "content": "hi"}]
    assert (ask.form, ask.reading) == (Form.MESSAGE, OutputReading())
    assert (ask.params.max_tokens, ask.params.stop, ask.params.top_k) == (9000, ("x",), 3)
    assert ask.ignored_fields == ()


def test_results_of_calls_are_messages_of_their_own() -> None:
    used = {"type": "tool_use", "id": "a", "name": "look", "input": {"at": "b"}}
    ask = parse(
        messages=[
            {"role": "user", "content": "look"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "text", "text": "I look."},
                    used,
                    {**used, "id": "b"},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "a", "content": "fog"},
                    {"type": "tool_result", "tool_use_id": "b", "is_error": True},
                    {"type": "text", "text": "and?"},
                ],
            },
        ]
    )
    function = {"name": "look", "arguments": '{"at":"b"}'}
    calls = [{"id": each, "type": "function", "function": function} for each in "ab"]
    assert messages(ask) == [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": text("I look."), "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a", "content": "fog"},
        {"role": "tool", "tool_call_id": "b", "content": "", "is_error": True},
        {"role": "user", "content": text("and?")},
    ]


def test_an_answer_that_has_begun_goes_on() -> None:
    ask = parse(messages=[*ASKED["messages"], {"role": "assistant", "content": "Well,"}])  # type: ignore[misc]
    assert ask.prompts[0].chat_template_kwargs == {"continue_final_message": True}
    assert ask.reading is not None
    assert not ask.reading.begins_thinking


@pytest.mark.parametrize(
    ("choice", "has_grammar"),
    [
        (None, False),
        ({"type": "auto"}, False),
        ({"type": "auto", "disable_parallel_tool_use": True}, True),
        ({"type": "any"}, True),
        ({"type": "tool", "name": "look"}, True),
        ({"type": "none"}, False),
    ],
)
def test_functions_are_given_to_the_template_and_what_must_hold_is_a_grammar(
    choice: dict[str, Any] | None, has_grammar: bool
) -> None:
    ask = parse(tools=[{**TOOL, "type": "custom", "cache_control": {"type": "ephemeral"}}], tool_choice=choice)
    given = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    is_none = choice == {"type": "none"}
    assert ask.prompts[0].chat_template_kwargs == (None if is_none else {"tools": given})
    assert (ask.params.structured_outputs is not None) is has_grammar


def test_thoughts_are_turned_on_and_off_by_the_switch_that_the_template_reads() -> None:
    for thinking, kwargs in (
        ({"type": "enabled", "budget_tokens": 2000}, {"enable_thinking": True}),
        ({"type": "disabled"}, {"enable_thinking": False}),
        ({"type": "adaptive"}, None),
    ):
        ask = parse(thinking=thinking)
        assert ask.prompts[0].chat_template_kwargs == kwargs
        assert ask.reading is not None
        assert ask.reading.begins_thinking is (thinking["type"] == "enabled")
    omitted = parse(thinking={"type": "adaptive", "display": "omitted"})
    assert omitted.reading is not None
    assert omitted.reading.without_reasoning


def test_a_model_is_not_asked_for_thoughts_in_a_way_that_it_does_not_have() -> None:
    parse(THINKING_ALWAYS, thinking={"type": "enabled", "budget_tokens": 2000})
    parse(Known(choose_formats(ChatFacts(), "auto", "auto")), thinking={"type": "disabled"})
    for models, thinking in (
        (THINKING_ALWAYS, {"type": "disabled"}),
        (Known(), {"type": "enabled", "budget_tokens": 2000}),
    ):
        with pytest.raises(PenstockError) as refused:
            parse(models, thinking=thinking)
        assert refused.value.param == "thinking"


def test_the_form_and_the_effort_are_those_of_the_output() -> None:
    ask = parse(output_config={"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}})
    assert ask.params.structured_outputs is not None
    assert ask.prompts[0].required_variables == ("reasoning_effort",)
    default = parse(output_config={"effort": "high"}).prompts[0]
    assert (default.chat_template_kwargs, default.required_variables) == ({"reasoning_effort": "high"}, ())


def test_what_clears_nothing_of_a_context_is_taken() -> None:
    keep: dict[str, Any] = {"type": "clear_thinking_20251015", "keep": "all"}
    assert parse(context_management={"edits": [keep]}).ignored_fields == ()
    with pytest.raises(PenstockError) as refused:
        parse(context_management={"edits": [{**keep, "keep": {"type": "thinking_turns", "value": 1}}]})
    assert refused.value.param == "context_management"


def test_a_count_needs_no_length_and_counts_what_the_template_is_given() -> None:
    body = {"messages": ASKED["messages"], "tools": [TOOL], "unheard": 1}
    ask = parse_count(json.dumps(body).encode(), CALLING)
    assert ask.prompt.chat_template_kwargs is not None
    assert ask.prompt.chat_template_kwargs["tools"][0]["function"]["name"] == "look"
    assert (ask.add_special_tokens, ask.ignored_fields) == (False, ("unheard",))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}]},
         "messages[0].content[0].type"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": "x"}]}]},
         "messages[0].content[0].input"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}]},
         "messages"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{**TOOL, "shape": 1}]}, "tools[0].shape"),
        ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name"),
        ({"tools": [TOOL], "tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}},
         "tool_choice.disable_parallel_tool_use"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 9000}}, "thinking.budget_tokens"),
        ({"output_config": {"format": {"type": "yaml"}}}, "output_config.format.type"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
        ({"stop": ["x"]}, "stop"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
    ],
)  # fmt: skip
def test_what_is_wrong_or_not_there_is_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(PenstockError) as refused:
        parse(**body)
    assert (refused.value.kind.http_status, refused.value.param) == (400, param)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (ErrorCode.INVALID_ARGUMENT, "invalid_request_error"),
        (ErrorCode.UNAUTHENTICATED, "authentication_error"),
        (ErrorCode.MODEL_NOT_FOUND, "not_found_error"),
        (ErrorCode.OVERLOADED, "rate_limit_error"),
        (ErrorCode.UNAVAILABLE, "overloaded_error"),
        (ErrorCode.INTERNAL, "api_error"),
    ],
)
def test_the_type_of_an_error_follows_from_its_status(code: ErrorCode, kind: str) -> None:
    assert message_error_fields(PenstockError(code, "hm")) == {
        "type": "error",
        "error": {"type": kind, "message": "hm"},
    }


def test_the_budget_of_a_thought_holds_where_a_token_closes_it() -> None:
    thinking = {"type": "enabled", "budget_tokens": 2000}
    assert parse(thinking=thinking).params.thinking_token_budget == 2000
    assert parse(thinking=thinking, thinking_token_budget=3).params.thinking_token_budget == 3
    assert parse(thinking={"type": "disabled"}).params.thinking_token_budget is None
    without_token = Known(choose_formats(replace(FACTS, marks={}), "auto", "auto"))
    assert parse(without_token, thinking=thinking).params.thinking_token_budget is None
