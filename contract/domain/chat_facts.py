"""The facts of a model's chat templates that its outputs are read by: tokenizers tell them, gateways go by them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

TOOL_FORMATS: Final = ("deepseek", "glm", "harmony", "hermes", "llama3_json", "mistral", "pythonic")
REASONING_FORMATS: Final = ("harmony", "think")
THOUGHT_MARKS: Final = ("<think>", "</think>")  # before and after a thought, in the format `think`
THINKING_SWITCHES: Final = ("enable_thinking", "thinking")  # variables of templates that turn thoughts on and off


@dataclass(frozen=True, slots=True)
class Mark:
    """A text that a chat template writes and that is one token of its own."""

    token_id: int
    is_special: bool  # has no text where special tokens are skipped


@dataclass(frozen=True, slots=True)
class ChatFacts:
    """The facts of one model."""

    tool_format: str = ""  # one of `TOOL_FORMATS`; empty: it is not known
    reasoning_format: str = ""  # one of `REASONING_FORMATS`; empty: it does not think, as far as is known
    # The settings with which its prompts end inside of a thought: `switch=true`, and empty for none of them.
    begins_thinking: frozenset[str] = frozenset()
    marks: Mapping[str, Mark] = field(default_factory=lambda: MappingProxyType({}))  # by text
    switches: frozenset[str] = frozenset()  # those of `THINKING_SWITCHES` that a template reads

    def is_thinking(self, variables: Mapping[str, Any]) -> bool:
        """Return whether a prompt ends inside of a thought, whose template is given these variables."""
        return setting_of(variables) in self.begins_thinking


def setting_of(variables: Mapping[str, Any]) -> str:
    """The setting that the variables of a template make, as `ChatFacts.begins_thinking` has it."""
    for name in THINKING_SWITCHES:
        if name in variables:
            return f"{name}={'true' if variables[name] else 'false'}"
    return ""


UNKNOWN_CHAT: Final = ChatFacts()
