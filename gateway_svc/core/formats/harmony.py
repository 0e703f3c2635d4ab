"""gpt-oss: messages on channels, of which one is for thoughts; calls are messages to functions."""

from gateway_svc.core.formats.channels import Channels
from gateway_svc.core.formats.table import ReasoningFormat, ToolFormat
from gateway_svc.core.formats.written import Written

_CHANNELS = Channels(
    start="<|start|>",
    channel="<|channel|>",
    constrain="<|constrain|>",
    message="<|message|>",
    end="<|end|>",
    last=("<|call|>", "<|return|>"),
    role="assistant",
    thoughts="analysis",
    remarks="commentary",
    answer="final",
    functions="functions.",
)

HARMONY = ToolFormat(
    "harmony",
    opens=(),
    bodies=(),
    written=(Written("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", ""),),
    channels=_CHANNELS,
)
HARMONY_THOUGHTS = ReasoningFormat(
    "harmony", opens=_CHANNELS.opening(_CHANNELS.thoughts), closes=_CHANNELS.end, channels=_CHANNELS
)
