"""The formats of one model: as the operator says, or as its chat templates show."""

from dataclasses import dataclass, replace
from typing import Final

from contract.domain.chat_facts import UNKNOWN_CHAT, ChatFacts
from gateway_svc.core.formats.channels import Channels
from gateway_svc.core.formats.registry import REASONING_FORMATS, TOOL_FORMATS
from gateway_svc.core.formats.table import ReasoningFormat, ToolFormat, channels_of

AUTO = "auto"
NONE = "none"


@dataclass(frozen=True, slots=True)
class ModelFormats:
    """The formats in which the outputs of a model are read."""

    tools: ToolFormat | None = None  # None: it is not known how it calls functions
    reasoning: ReasoningFormat | None = None  # None: its thoughts are content
    facts: ChatFacts = UNKNOWN_CHAT

    @property
    def channels(self) -> Channels | None:
        """The marks of the messages that an output is made of; None: it is one."""
        return channels_of(self.tools, self.reasoning)


NO_FORMATS: Final = ModelFormats()


def choose_formats(facts: ChatFacts, tool_format: str, reasoning_format: str) -> ModelFormats:
    """The formats by what the operator says: `auto` (as `facts` has it), `none` or a name."""
    tools = facts.tool_format if tool_format == AUTO else tool_format
    reasoning = facts.reasoning_format if reasoning_format == AUTO else reasoning_format
    # A name that is not known here was told by a tokenizer of a newer version.
    chosen = ModelFormats(TOOL_FORMATS.get(tools), REASONING_FORMATS.get(reasoning), facts)
    if chosen.tools is None or chosen.reasoning is None or chosen.tools.channels is chosen.reasoning.channels:
        return chosen
    # Channels are of a whole output: what stands in one text goes with none of them.
    return replace(chosen, tools=None) if chosen.tools.channels is None else replace(chosen, reasoning=None)
