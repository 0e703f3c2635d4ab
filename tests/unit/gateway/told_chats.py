"""Chats whose outputs are more than content, as clients put them together."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from contract.domain.chat_facts import ChatFacts, Mark

FACTS = ChatFacts(
    "hermes",
    "think",
    frozenset({"enable_thinking=true"}),
    {"</think>": Mark(900, False), "<|im_end|>": Mark(901, True), "<tool_call>": Mark(902, True)},
    frozenset({"enable_thinking"}),
)
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
ASKED: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
# Text and tokens of rows; what they say together is in `SAID`.
ROWS: tuple[tuple[str, list[int]], ...] = (
    ("<thi", [1]),
    ("nk>\nlet", [2]),
    (" me", [3]),
    (" see\n</think", [4, 5]),
    (">\n\nI ", [900, 6]),
    ("look.\n<tool_", [7]),
    ('call>\n{"name": "lo', [8]),
    ('ok", "argu', [9]),
    ('ments": {"at": "a <', [10]),
    ('b>"}', [11]),
    ("}\n</tool_call>\n<tool_call>", [12, 13]),
    ('{"name": "look", "arguments": {}}', [14]),
    ("</tool_call><|im_end|>", [15, 16]),
)


@dataclass
class Choice:
    """One choice, put together from a stream's deltas."""

    reasoning: str = ""
    content: str = ""
    calls: list[dict[str, str]] = field(default_factory=list)
    finish: str = ""

    def add(self, chunk_choice: dict[str, Any]) -> None:
        delta = chunk_choice["delta"]
        assert delta.get("reasoning") == delta.get("reasoning_content")
        self.reasoning += delta.get("reasoning") or ""
        self.content += delta.get("content") or ""
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(self.calls)
                assert call["type"] == "function"
                self.calls.append({"id": call["id"], "name": call["function"]["name"], "arguments": ""})
            self.calls[call["index"]]["arguments"] += call["function"].get("arguments", "")
        self.finish = chunk_choice["finish_reason"] or self.finish


def put_together(lines: Iterable[str], choice: Choice | None = None) -> tuple[Choice, list[str], dict[str, Any]]:
    """The content, ids and usage of the events of one choice."""
    choice, ids, usage = choice or Choice(), [""], {}
    for line in lines:
        name, _, value = line.partition(": ")
        if name == "id":
            ids.append(value)
        elif name == "data" and value != "[DONE]":
            chunk = json.loads(value)
            usage = chunk.get("usage") or usage
            for each in chunk["choices"]:
                choice.add(each)
    return choice, ids, usage


def of_message(choice: dict[str, Any]) -> Choice:
    """One choice of a plain reply."""
    message = choice["message"]
    calls = [{"id": each["id"], **each["function"]} for each in message.get("tool_calls", ())]
    assert message["reasoning"] == message["reasoning_content"]
    return Choice(message["reasoning"] or "", message["content"] or "", calls, choice["finish_reason"])
