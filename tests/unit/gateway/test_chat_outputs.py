"""The form that a chat's body asks of its outputs, for models of each family."""

from typing import Any

import pytest

from contract.domain.chat_facts import ChatFacts, Mark
from contract.domain.errors import PenstockError
from contract.domain.params import SamplingParams
from contract.domain.structured_outputs import StructuredOutputsParams
from gateway_svc.core.chat_outputs import ChatOutput, chat_output
from gateway_svc.core.formats.choice import NO_FORMATS, ModelFormats, choose_formats
from gateway_svc.core.tools import MAX_TOOLS, ToolFields

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}, "n": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
_FORMS: tuple[dict[str, Any], ...] = ({"json_object": True}, {"regex": "a+"})
MARKS = {
    "[TOOL_CALLS]": Mark(5, True),
    "[ARGS]": Mark(6, True),
    "[INST]": Mark(7, True),
    "[THING]": Mark(8, False),
    "</think>": Mark(9, False),
}


def formats(tools: str, reasoning: str = "none", **facts: Any) -> ModelFormats:
    return choose_formats(ChatFacts(marks=MARKS, **facts), tools, reasoning)


def output(of: ModelFormats, kwargs: dict[str, Any] | None = None, **fields: Any) -> ChatOutput:
    given: dict[str, Any] = {"tools": [TOOL], **fields}
    params = SamplingParams(**given.pop("params", {}))
    return chat_output(ToolFields(**given), params, kwargs or {}, of)


def test_without_formats_outputs_are_content() -> None:
    told = output(NO_FORMATS, tools=None)
    assert (told.reading, told.params, told.variables) == (None, SamplingParams(), {})


def test_marks_that_are_special_tokens_are_asked_for_and_other_special_tokens_hidden() -> None:
    told = output(formats("mistral"))
    assert told.params.skip_special_tokens is False
    assert told.reading is not None
    assert told.reading.hidden == ("[INST]",)
    assert told.variables == {"tools": [TOOL]}


def test_who_asks_for_special_tokens_gets_them() -> None:
    told = output(formats("mistral"), params={"skip_special_tokens": False})
    assert told.reading is not None
    assert told.reading.hidden == ()


def test_marks_that_are_plain_text_are_read_as_they_come() -> None:
    told = output(formats("hermes", "think"))
    assert told.params == SamplingParams()
    assert told.reading is not None
    assert (told.reading.hidden, told.reading.closing_token_id) == ((), 9)


@pytest.mark.parametrize(
    ("kwargs", "is_thinking"),
    [
        ({}, True),
        ({"enable_thinking": False}, False),
        ({"add_generation_prompt": False}, False),
        ({"continue_final_message": True}, False),
        ({"continue_final_message": "reasoning_content"}, True),
    ],
)
def test_it_is_known_whether_a_prompt_ends_in_a_thought(kwargs: dict[str, Any], is_thinking: bool) -> None:
    told = output(formats("hermes", "think", begins_thinking=frozenset({""})), kwargs)
    assert told.reading is not None
    assert told.reading.begins_thinking is is_thinking


def test_texts_are_read_as_they_are_written() -> None:
    """Of GLM: a text of which the schema says more than that is JSON where a grammar holds it to that."""
    schema = {"properties": {"path": {"type": "string"}, "zip": {"type": "string", "pattern": "[0-9]{5}"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    for fields, texts in (
        ({}, ("path", "zip")),
        ({"parallel_tool_calls": False}, ("path", "zip")),
        ({"tool_choice": "required"}, ("path",)),
    ):
        told = output(formats("glm"), **{"tools": [tool], **fields})
        assert told.reading is not None
        assert told.reading.texts == (("f", texts),)


@pytest.mark.parametrize(
    ("fields", "has_grammar"),
    [
        ({}, False),
        ({"tool_choice": "required"}, True),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, True),
        ({"parallel_tool_calls": False}, True),
        ({"parallel_tool_calls": True}, False),
        ({"tools": [{"type": "function", "function": {**TOOL["function"], "strict": True}}]}, True),  # type: ignore[dict-item]
    ],
)
def test_what_must_hold_is_a_grammar(fields: dict[str, Any], has_grammar: bool) -> None:
    told = output(formats("hermes"), **fields)
    assert (told.params.structured_outputs is not None) is has_grammar


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [TOOL] * (MAX_TOOLS + 1)}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]}, "tools[0].function.strict"),
        ({"tools": [{"type": "function", "function": {"name": "f", "x": 1}}]}, "tools[0].function.x"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"kwargs": {"tools": []}}, "tools"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(PenstockError) as refused:
        output(formats("glm"), **fields)
    assert refused.value.param == param


def test_json_comes_after_a_thought_and_beside_tools_and_other_forms_are_the_whole_output() -> None:
    of = formats("hermes", "think", begins_thinking=frozenset({""}))
    as_json, as_regex = ({"structured_outputs": StructuredOutputsParams(**each)} for each in _FORMS)
    for tools in ([TOOL], None):
        told = output(of, tools=tools, params=as_json)
        assert told.params.structured_outputs is not None
        assert told.params.structured_outputs.said == "grammar"
        assert told.reading is not None
        assert told.reading.begins_thinking
    whole = output(of, tools=None, params=as_regex)
    assert (whole.reading, whole.params.structured_outputs) == (None, as_regex["structured_outputs"])
    for wrong in ({"params": as_regex}, {"params": as_json, "tool_choice": "required"}):
        with pytest.raises(PenstockError) as refused:
            output(of, **wrong)
        assert refused.value.param == "tools"


def test_messages_on_channels_are_read_whatever_is_known_of_their_marks() -> None:
    known = choose_formats(ChatFacts(marks={"<|call|>": Mark(7, True), "<|x|>": Mark(8, True)}), "harmony", "harmony")
    told = output(known, params={"stop_token_ids": (3,)})
    assert told.params.stop_token_ids == (3, 7)
    assert told.params.skip_special_tokens is False
    assert told.reading is not None
    assert (told.reading.tool_format, told.reading.reasoning_format) == ("harmony", "harmony")
    assert told.reading.hidden == ("<|x|>",)
    unknown = output(choose_formats(ChatFacts(), "harmony", "none"), params={"ignore_eos": True})
    assert (unknown.params.skip_special_tokens, unknown.params.stop_token_ids) == (False, ())


def test_channels_and_texts_do_not_go_together() -> None:
    for tools, reasoning in (("harmony", "think"), ("hermes", "harmony")):
        chosen = choose_formats(ChatFacts(), tools, reasoning)
        found = [each.name for each in (chosen.tools, chosen.reasoning) if each is not None]
        assert found == ["harmony"]


def test_the_operator_decides_about_formats() -> None:
    facts = ChatFacts("hermes", "think")
    assert choose_formats(facts, "none", "none") == ModelFormats(None, None, facts)
    chosen = choose_formats(facts, "auto", "auto")
    assert (chosen.tools and chosen.tools.name, chosen.reasoning and chosen.reasoning.name) == ("hermes", "think")
    assert choose_formats(ChatFacts("of tomorrow"), "auto", "auto").tools is None
