"""The form of outputs, as the templates of families show it."""

from pathlib import Path

import pytest
from byte_tokenizer import HARMONY_MARKS, HARMONY_TEMPLATE, TOOL_MARKS, TOOL_TEMPLATE, write_byte_model
from model_templates import QWEN25
from tokenizers import AddedToken, Tokenizer, models

from contract.domain import chat_facts as facts_of_chats
from contract.domain.chat_facts import ChatFacts, Mark
from contract.domain.errors import PenstockError
from contract.domain.request import Message
from contract.wire.chat_facts import decode_chat_facts, encode_chat_facts
from gateway_svc.core.formats.registry import REASONING_FORMATS, TOOL_FORMATS
from tokenizer_svc.core.chat import ChatTemplates
from tokenizer_svc.core.output_formats import chat_facts
from tokenizer_svc.loading import load_vocabulary

LLAMA = """{%- if tools %}{{ 'Respond so: {"name": function name, "parameters": its arguments}.' }}{%- endif %}
{{ messages[0].content }}"""
MISTRAL = "{{ '[INST]' + messages[0].content }}{{ '[TOOL_CALLS]' + (messages | tojson) }}"
DEEPSEEK = "{{ messages[0].content }}{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' }}<think>\n</think>"
GLM = "{{ tools }}<tool_call>{name}<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>{{ messages[0].content }}"
# As that of Qwen 3: a thought is shut where none is wanted.
SWITCHED = """{{ messages[0].content }}</think>{% if enable_thinking is defined and enable_thinking is false %}\
<think>\n\n</think>\n\n{% elif enable_thinking %}<think>\n{% endif %}"""
CODER = "{{ tools }}<tool_call>\n<function=f>\n<parameter=arguments>{{ messages[0].content }}"


def facts(template: str, *special: str, plain: tuple[str, ...] = ()) -> ChatFacts:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in special])
    tokenizer.add_tokens([AddedToken(each, special=False) for each in plain])
    return chat_facts(ChatTemplates({"default": template}, {"eos_token": "</s>"}), tokenizer)


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        (QWEN25, "hermes", ""),
        (MISTRAL, "mistral", ""),
        (LLAMA, "llama3_json", ""),
        (DEEPSEEK, "deepseek", "think"),
        (GLM, "glm", ""),
        (TOOL_TEMPLATE, "hermes", "think"),
        (HARMONY_TEMPLATE, "harmony", "harmony"),
        (CODER, "", ""),
        ("{{ messages[0].content }}", "", ""),
    ],
)
def test_a_template_shows_how_its_model_calls_and_thinks(template: str, tools: str, reasoning: str) -> None:
    found = facts(template)
    assert (found.tool_format, found.reasoning_format) == (tools, reasoning)


def test_it_is_tried_with_which_switches_a_prompt_ends_in_a_thought() -> None:
    every = {"", "enable_thinking=true", "enable_thinking=false", "thinking=true", "thinking=false"}
    assert facts("{{ messages[0].content }}</think><think>\n").begins_thinking == every
    switched = facts(SWITCHED)
    assert switched.begins_thinking == {"enable_thinking=true"}
    assert switched.is_thinking({"enable_thinking": True, "x": 1})
    assert not switched.is_thinking({})
    assert not switched.is_thinking({"enable_thinking": False})
    assert facts("{{ messages[0].content }} <think> </think>").begins_thinking == frozenset()
    assert facts("{{ raise_exception('no') }}</think><think>").begins_thinking == frozenset()


def test_marks_are_the_tokens_that_templates_write() -> None:
    found = facts(MISTRAL, "[TOOL_CALLS]", "[NEVER]", "</s>", plain=("[INST]",))
    assert found.marks["[TOOL_CALLS]"] == Mark(1, True)
    assert found.marks["</s>"].is_special
    assert not found.marks["[INST]"].is_special
    assert "[NEVER]" not in found.marks


def test_marks_that_no_template_writes_are_known_too() -> None:
    assert set(HARMONY_MARKS) - {"<|return|>"} == facts(HARMONY_TEMPLATE, *HARMONY_MARKS).marks.keys() - {"<|return|>"}


def test_a_message_that_thinks_says_and_calls_is_given_as_its_template_takes_it() -> None:
    call = {"function": {"name": "f", "arguments": '{"a": 1}'}}
    templates = ChatTemplates({"default": HARMONY_TEMPLATE}, {})
    said = Message("assistant", "I look.", {"reasoning": "hm", "tool_calls": [call]})
    text = templates.render([Message("user", "a"), said])
    assert "<|channel|>analysis<|message|>hm\n\nI look.<|end|>" in text
    assert text.count("I look.") == 1
    with pytest.raises(PenstockError, match="no"):
        ChatTemplates({"default": "{{ raise_exception('no') }}"}, {}).render([said])


def test_facts_come_as_they_were_told() -> None:
    found = facts(SWITCHED, "<|im_end|>", "</s>", plain=("</think>",))
    assert decode_chat_facts(encode_chat_facts(found)) == found


def test_gateways_know_the_formats_that_tokenizers_tell() -> None:
    assert set(TOOL_FORMATS) == set(facts_of_chats.TOOL_FORMATS)
    assert set(REASONING_FORMATS) == set(facts_of_chats.REASONING_FORMATS)


def test_a_checkpoint_shows_its_formats(tmp_path: Path) -> None:
    write_byte_model(tmp_path, vocab_size=300, calls=True)
    found = load_vocabulary(str(tmp_path)).facts
    assert (found.tool_format, found.reasoning_format) == ("hermes", "think")
    assert set(TOOL_MARKS) <= set(found.marks)
    assert found.begins_thinking == {"enable_thinking=true"}
