"""The form of a model's outputs, found in what its chat templates write."""

from collections.abc import Iterable, Mapping
from typing import Final

from tokenizers import Tokenizer

from contract.domain.chat_facts import THINKING_SWITCHES, THOUGHT_MARKS, ChatFacts, Mark, setting_of
from contract.domain.errors import PenstockError
from contract.domain.request import Message
from tokenizer_svc.core.chat import ChatTemplates

_HARMONY = "<|channel|>", "<|message|>", "<|call|>"
_UNWRITTEN = ("<|constrain|>",)  # marks that models write and templates do not
# What a template of each family has in it: the first that fits is it. A template writes earlier calls as its model
# does, so the marks are there.
_TOOLS: Final[Mapping[str, tuple[str, ...]]] = {
    "harmony": _HARMONY,
    "deepseek": ("<｜tool▁call▁begin｜>",),
    "mistral": ("[TOOL_CALLS]",),
    "glm": ("<arg_key>", "<tool_call>"),
    "hermes": ("<tool_call>", "arguments"),
    "pythonic": ("[func_name1(",),
    "llama3_json": ('{"name": function name, "parameters":',),
}
_OTHERS = ("<function=",)  # of models that call in ways that are not read here, though they share marks
_ASKED = (Message("user", "a"),)


def chat_facts(chat: ChatTemplates, tokenizer: Tokenizer) -> ChatFacts:
    """The facts of a model with these templates and this vocabulary."""
    written = "\n".join(chat.sources.values())
    thinks = THOUGHT_MARKS[1] in written
    is_harmony = all(mark in written for mark in _HARMONY)
    return ChatFacts(
        tool_format=_tool_format(written),
        reasoning_format="harmony" if is_harmony else "think" if thinks else "",
        begins_thinking=frozenset(_thinking_settings(chat)) if thinks else frozenset(),
        marks=_marks(written, chat.special_texts, tokenizer),
        switches=frozenset(THINKING_SWITCHES) & chat.variables,
    )


def _tool_format(written: str) -> str:
    if any(mark in written for mark in _OTHERS):
        return ""
    return next((name for name, marks in _TOOLS.items() if all(mark in written for mark in marks)), "")


def _thinking_settings(chat: ChatTemplates) -> Iterable[str]:
    """The settings with which the template itself opens a thought, found by trying them."""
    for variables in ({}, *({name: value} for name in THINKING_SWITCHES for value in (True, False))):
        try:
            text = chat.render(_ASKED, variables)
        except PenstockError:  # a template that wants more than one message: it opens nothing, as far as is known
            continue
        if text.rstrip().endswith(THOUGHT_MARKS[0]):
            yield setting_of(variables)


def _marks(written: str, special: Iterable[str], tokenizer: Tokenizer) -> dict[str, Mark]:
    wanted = frozenset(special)
    return {
        token.content: Mark(token_id, bool(token.special))
        for token_id, token in tokenizer.get_added_tokens_decoder().items()
        if token.content and (token.content in written or token.content in wanted or token.content in _UNWRITTEN)
    }
