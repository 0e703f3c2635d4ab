"""The way in which one output is read."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from gateway_svc.core.formats.channels import Channels
from gateway_svc.core.formats.table import ReasoningFormat, ToolFormat, channels_of


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """All that its reader goes by."""

    tools: ToolFormat | None = None  # None: calls are text
    reasoning: ReasoningFormat | None = None  # None: thoughts are text
    is_reasoning: bool = False  # the prompt ends inside of a thought
    hidden: tuple[str, ...] = ()  # special tokens of the model that nobody is told
    texts: Mapping[str, frozenset[str]] = field(default_factory=dict)  # function → its parameters that are texts

    def __bool__(self) -> bool:
        return bool(self.tools or self.reasoning or self.hidden)

    @property
    def channels(self) -> Channels | None:
        """The marks of its messages; None: it is one message."""
        return channels_of(self.tools, self.reasoning)
