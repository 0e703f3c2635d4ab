"""Facts of a model's chat templates: tokenizers tell them, gateways read outputs by them."""

from types import MappingProxyType

from contract.domain.chat_facts import ChatFacts, Mark
from contract.v1 import status_pb2


def encode_chat_facts(facts: ChatFacts) -> status_pb2.ChatFacts:
    """A penstock.v1.ChatFacts."""
    return status_pb2.ChatFacts(
        tool_format=facts.tool_format,
        reasoning_format=facts.reasoning_format,
        begins_thinking=sorted(facts.begins_thinking),
        switches=sorted(facts.switches),
        marks=[
            status_pb2.TextMark(text=text, token_id=mark.token_id, special=mark.is_special)
            for text, mark in facts.marks.items()
        ],
    )


def decode_chat_facts(message: status_pb2.ChatFacts) -> ChatFacts:
    """The inverse of `encode_chat_facts`."""
    marks = {each.text: Mark(each.token_id, each.special) for each in message.marks}
    return ChatFacts(
        message.tool_format,
        message.reasoning_format,
        frozenset(message.begins_thinking),
        MappingProxyType(marks),
        frozenset(message.switches),
    )
