"""Events of a generation, as clients get them."""

from dataclasses import dataclass
from typing import TypeAlias

from contract.domain.finish import FinishReason, Usage
from contract.domain.rows import TokenLogprob
from penstock.outputs import Logprob


@dataclass(frozen=True, slots=True)
class Accepted:
    """The first event of a generation: it will end exactly once."""

    request_id: str  # 32 hexadecimal digits
    model: str
    seed: int  # unsigned 64-bit; the one given, or drawn by the gateway
    prompt_token_ids: tuple[int, ...] = ()  # if they were asked for


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """The part of an event that a call of a function gets."""

    index: int  # of the call among those of the sample
    id: str = ""  # with its beginning
    name: str = ""  # of the function; with its beginning
    arguments: str = ""  # more of its JSON


@dataclass(frozen=True, slots=True)
class ChatDelta:
    """The part of an event that an output of a chat gets."""

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    num_reasoning_tokens: int | None = None  # of the whole sample, with its end, if it is known


@dataclass(frozen=True, slots=True)
class Delta:
    """The part of a step that a sample gets."""

    sequence: int  # index of the sample
    token_offset: int  # output tokens of the sample before this event
    token_ids: tuple[int, ...]
    text: str  # may be empty
    logprobs: tuple[TokenLogprob, ...] = ()  # one for each token, if asked for
    finish: FinishReason = FinishReason.UNSPECIFIED  # why the sample ended
    stop_reason: int | str | None = None  # the stop token id or stop string that ended it; None for EOS and length
    usage: Usage | None = None  # totals of the request, with the end of its last sample
    system_fingerprint: str = ""  # of the model; told with the first and the last event of a sample
    chat: ChatDelta | None = None  # what it adds to an output that is told in parts; `text` is empty then


@dataclass(frozen=True, slots=True)
class PromptPart:
    """The logprobs of a part of the prompt, if they were asked for; all parts come before the first `Delta`."""

    position: int  # index in the prompt of the first token
    logprobs: tuple[dict[int, Logprob], ...]  # of each token, by id: its own and those of the most likely there


Event: TypeAlias = Accepted | PromptPart | Delta
