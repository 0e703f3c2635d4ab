"""Templates of well-known families get what transformers gives them, from messages as OpenAI's clients send them."""

import json
from typing import Any

import pytest
from checkpoint_files import tokenizer
from model_templates import DEEPSEEK_R1, GEMMA3, LLAMA3, QWEN3, WALK_PARTS, WANT_TEXT
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from contract.domain.errors import ErrorCode, PenstockError
from gateway_svc.core.messages import parse_messages
from tokenizer_svc.core.chat import ChatTemplates

Chat = list[dict[str, Any]]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TEMPLATES = WANT_TEXT | WALK_PARTS


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def call(arguments: str, content: str | list[dict[str, str]] | None = None) -> dict[str, Any]:
    function = {"name": "rain", "arguments": arguments}
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"type": "function", "id": "call12345", "function": function}],
        "refusal": None,
    }


SYSTEM = {"role": "system", "content": " Be brief. "}
USER = {"role": "user", "content": "Rain in <Köln> & Bonn? "}
ANSWER = {"role": "assistant", "content": "<think>hm\n</think>\nYes. \n"}
TOOLS = [{"type": "function", "function": {"name": "rain", "parameters": {"at": {"type": "string"}}}}]
RESULT = {"role": "tool", "content": "wet", "tool_call_id": "call12345"}
CHATS: dict[str, tuple[Chat, dict[str, Any]]] = {
    "turns": ([USER, ANSWER, USER], {}),
    "system": ([SYSTEM, USER, ANSWER, USER], {}),
    "no generation prompt": ([SYSTEM, USER, ANSWER], {"add_generation_prompt": False}),
    "continued": ([USER, ANSWER], {"continue_final_message": True}),
    "continued trimmed": ([USER, {"role": "assistant", "content": "  It is \n "}], {"continue_final_message": True}),
    "continued parts": (
        [USER, {"role": "assistant", "content": parts("It", "is ")}],
        {"continue_final_message": True},
    ),
    "continued from nothing": ([USER, {"role": "assistant", "content": ""}], {"continue_final_message": True}),
    "continued thought": (
        [USER, {"role": "assistant", "content": "", "reasoning": "Let me "}],
        {"continue_final_message": "reasoning_content"},
    ),
    "tools offered": ([SYSTEM, USER], {"tools": TOOLS}),
    "call": ([USER, call('{"at": "Köln", "days": [1, 2.5, null]}'), RESULT], {"tools": TOOLS}),
    "call with words": ([USER, call('{"at": "Bonn"}', "I look."), RESULT, ANSWER, USER], {"tools": TOOLS}),
    "call without arguments": ([USER, call(""), RESULT], {}),
    "result in parts": ([USER, call('{"at": "Bonn"}'), {**RESULT, "content": parts("wet", " cold ")}], {}),
    "parts": ([{**SYSTEM, "content": parts("One.")}, {**USER, "content": parts("a ", " b", "c")}], {}),
    "thought": ([USER, {**ANSWER, "content": "Yes.", "thinking": "It rains."}, USER], {"enable_thinking": False}),
    "nulls": ([{**USER, "name": None}, {"role": "assistant", "content": "a", "tool_calls": None}, USER], {}),
}


def as_transformers_wants(chat: Chat, *, keeps_parts: bool) -> Chat:
    """The same conversation in the form that transformers' users write: objects as arguments, texts as contents."""
    told = json.loads(json.dumps(chat))
    for message in told:
        if isinstance(message["content"], list) and not keeps_parts:
            message["content"] = "\n".join(part["text"] for part in message["content"])
        for each in message.get("tool_calls") or []:
            each["function"]["arguments"] = json.loads(each["function"]["arguments"] or "{}")
    return told


def reference(template: str, chat: Chat, kwargs: dict[str, Any]) -> str:
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer(), **SPECIAL)
    theirs = {"add_generation_prompt": not kwargs.get("continue_final_message"), **kwargs}
    text: str = made.apply_chat_template(chat, chat_template=template, tokenize=False, **theirs)
    return text


def ours(template: str, chat: Chat, kwargs: dict[str, Any] | None = None) -> str:
    return ChatTemplates({"default": template}, SPECIAL).render(parse_messages(chat), kwargs)


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_familys_template_renders_as_in_transformers(name: str, chat: str) -> None:
    messages, kwargs = CHATS[chat]
    wanted = as_transformers_wants(messages, keeps_parts=name in WALK_PARTS)
    try:
        expected = reference(TEMPLATES[name], wanted, kwargs)
    except Exception:  # noqa: BLE001  what a template makes of what it does not know
        if (name == "deepseek-r1" and "call" in chat) or chat == "result in parts":
            return  # below
        with pytest.raises(PenstockError) as refused:
            ours(TEMPLATES[name], messages, kwargs)
        assert refused.value.code is ErrorCode.INVALID_ARGUMENT
    else:
        assert ours(TEMPLATES[name], messages, kwargs) == expected


@pytest.mark.parametrize(
    ("name", "chats"),
    [
        ("llama3", {"call", "call with words", "parts", "continued trimmed"}),
        ("qwen2.5", {"call", "call with words", "parts", "result in parts", "continued"}),
        ("qwen3", {"call", "thought", "parts", "continued thought"}),
        ("mistral", {"call", "tools offered", "parts"}),
        ("gemma2", {"turns", "continued parts"}),
        ("gemma3", {"turns", "parts", "continued parts"}),
        ("phi3", {"system", "parts"}),
        ("phi4", {"system", "parts"}),
        ("deepseek-r1", {"system", "parts"}),
        ("zephyr", {"system", "parts"}),
        ("by macro", {"parts", "call", "result in parts"}),
    ],
)
def test_the_reference_can_render_what_a_family_is_known_for(name: str, chats: set[str]) -> None:
    """Else the test before this one would compare nothing."""
    for chat in chats:
        messages, kwargs = CHATS[chat]
        assert reference(TEMPLATES[name], as_transformers_wants(messages, keeps_parts=name in WALK_PARTS), kwargs)


@pytest.mark.parametrize("chat", ["call", "call without arguments", "result in parts"])
def test_a_template_that_asks_whether_content_is_none_writes_the_call(chat: str) -> None:
    """transformers leaves the key out, over which such templates fail; they get the null, and the text of arguments."""
    messages, kwargs = CHATS[chat]
    told = [{**each, "content": each["content"]} for each in messages]
    for each in told:
        if isinstance(each["content"], list):
            each["content"] = "\n".join(part["text"] for part in each["content"])
    (expected,), _ = render_jinja_template(
        [told], chat_template=DEEPSEEK_R1, add_generation_prompt=True, **{"tools": None, **kwargs}, **SPECIAL
    )
    arguments = messages[1]["tool_calls"][0]["function"]["arguments"]
    assert f"<call>function<sep>rain\n```json\n{arguments}\n```</call><output>wet" in expected
    assert ours(DEEPSEEK_R1, messages, kwargs) == expected


@pytest.mark.parametrize("arguments", ["{", "[1]", "5", '"x"', "[" * 100_000])
def test_arguments_that_are_no_object_are_refused_by_name(arguments: str) -> None:
    with pytest.raises(PenstockError) as refused:
        ours(LLAMA3, [USER, call(arguments)])
    assert refused.value.code is ErrorCode.INVALID_ARGUMENT
    assert refused.value.param == "messages[1].tool_calls[0].function.arguments"


def test_a_text_for_a_template_that_walks_parts_stays_a_text() -> None:
    expected = "<s><start_of_turn>user\na<end_of_turn>\n<start_of_turn>model\n"
    assert ours(GEMMA3, [{"role": "user", "content": " a "}]) == expected


def test_the_object_of_arguments_is_written_as_json() -> None:
    assert '"parameters": {"at": "Köln"}}' in ours(LLAMA3, [USER, call('{"at":"Köln"}')])


def test_the_end_of_the_final_message_is_where_the_model_goes_on() -> None:
    chat: Chat = [USER, {"role": "assistant", "content": "yes yes"}]
    assert ours(QWEN3, chat, {"continue_final_message": True}).endswith("</think>\n\nyes yes")
