"""Chats over gRPC whose outputs are told apart: what may be asked of them, and what is told."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from contract.domain.errors import ErrorCode, PenstockError, invalid
from contract.domain.finish import FinishReason, Usage
from contract.domain.params import SamplingParams
from contract.v1 import inference_pb2
from penstock.client.events import Accepted, Delta, Event
from penstock.client.wire import Chat, ParamsLike, encode_call

_MODES = {
    "none": inference_pb2.TOOL_MODE_NONE,
    "auto": inference_pb2.TOOL_MODE_AUTO,
    "required": inference_pb2.TOOL_MODE_REQUIRED,
}
_ENDS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


class TemplateOptions(TypedDict, total=False):
    """The options of a chat's prompt beside messages and parameters."""

    tools: Sequence[Mapping[str, Any]] | None  # functions that the model may call, as OpenAI's clients say them
    tool_choice: str | Mapping[str, Any] | None  # none, auto, required, {"type": "function", "function": {"name": …}}
    parallel_tool_calls: bool | None  # False: at most one is called
    include_reasoning: bool  # False: what the model thinks is not told
    chat_template_kwargs: Mapping[str, Any] | None  # variables for the chat template, such as `reasoning_effort`
    model: str  # empty: the one that is served


class ChatOptions(TemplateOptions, total=False):
    """The options of a chat beside messages and parameters."""

    # As of `Client.generate`:
    priority: int
    timeout_s: float | None
    resumable: bool
    idempotency_key: str | None
    cache_salt: str | None


@dataclass(slots=True)
class ToolCall:
    """A call of a function."""

    id: str
    name: str
    arguments: str = ""  # as the model wrote them: JSON, unless the output was cut


@dataclass(slots=True)
class ChatChoice:
    """One answer of a chat."""

    content: str = ""
    reasoning: str = ""  # what the model thought
    tool_calls: list[ToolCall] = field(default_factory=list)
    finish_reason: str | None = None  # stop, length or tool_calls
    num_reasoning_tokens: int | None = None  # output tokens that it thought with, if it is known

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message, for the next call."""
        calls = [
            {"id": each.id, "type": "function", "function": {"name": each.name, "arguments": each.arguments}}
            for each in self.tool_calls
        ]
        told = {"content": self.content, "reasoning": self.reasoning, "tool_calls": calls}
        return {"role": "assistant", **{name: value for name, value in told.items() if value or name == "content"}}

    def extend(self, delta: Delta) -> None:
        """Adds what one event brought."""
        if (more := delta.chat) is not None:
            self.content += more.content
            self.reasoning += more.reasoning
            self.num_reasoning_tokens = more.num_reasoning_tokens
            for each in more.tool_calls:
                if each.id:
                    self.tool_calls.append(ToolCall(each.id, each.name))
                self.tool_calls[each.index].arguments += each.arguments
        if delta.finish:
            reason = _ENDS.get(delta.finish)
            self.finish_reason = "tool_calls" if reason == "stop" and self.tool_calls else reason


@dataclass(slots=True)
class ChatReply:
    """All answers of a chat: what its events add up to."""

    accepted: Accepted
    choices: list[ChatChoice]
    usage: Usage | None = None

    @property
    def message(self) -> dict[str, Any]:
        """The first answer as a message, for the next call."""
        return self.choices[0].message

    @classmethod
    def begun(cls, event: Event, n: int) -> "ChatReply":
        """A reply without answers so far; `event`: the first one of `n` samples.

        Raises:
            PenstockError: INTERNAL: it is another event.
        """
        if not isinstance(event, Accepted):
            raise PenstockError(ErrorCode.INTERNAL, "the stream of events began without its acceptance")
        return cls(event, [ChatChoice() for _ in range(n)])

    def extend(self, event: Event) -> None:
        """Adds what one event brought."""
        if isinstance(event, Delta):
            self.choices[event.sequence].extend(event)
            self.usage = event.usage or self.usage

    @staticmethod
    def ended(reply: "ChatReply | None") -> "ChatReply":
        """The reply, if its stream was one.

        Raises:
            PenstockError: INTERNAL: the stream ended well, but before all answers had.
        """
        if reply is None or not all(each.finish_reason for each in reply.choices):
            raise PenstockError(ErrorCode.INTERNAL, "the stream of events ended too early")
        return reply


def encode_chat(
    messages: Chat,
    params: ParamsLike,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_choice: str | Mapping[str, Any] | None = None,
    parallel_tool_calls: bool | None = None,
    include_reasoning: bool = True,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    model: str = "",
    priority: int = 0,
    timeout_s: float | None = None,  # noqa: ARG001  (of the call, not of what it says)
    resumable: bool = False,
    idempotency_key: str | None = None,
    cache_salt: str | None = None,
) -> inference_pb2.GenerateCall:
    """The input of `Generate` for a chat with the options of `ChatOptions`.

    Raises:
        PenstockError: INVALID_ARGUMENT naming the argument.
    """
    output = inference_pb2.ChatOutput(
        tools=[_tool(f"tools[{index}]", each) for index, each in enumerate(tools or ())],
        tool_choice=_choice(tool_choice),
        parallel_tool_calls=parallel_tool_calls,
        without_reasoning=not include_reasoning,
    )
    # Without a word on it an answer is as long as the context lets it, as over HTTP.
    params = params if isinstance(params, SamplingParams) else {"max_tokens": None, **(params or {})}
    return encode_call(
        None,
        messages,
        params,
        model,
        priority,
        resumable=resumable,
        idempotency_key=idempotency_key,
        cache_salt=cache_salt,
        chat=output,
        chat_template_kwargs=chat_template_kwargs,
    )


def _tool(where: str, tool: Mapping[str, Any]) -> inference_pb2.Tool:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, Mapping):
        raise invalid(f'{where} must be {{"type": "function", "function": {{…}}}}', where)
    known = {"name", "description", "parameters", "strict"}
    if unknown := [name for name in function if name not in known]:
        raise invalid(f"{where}.function has no field {unknown[0]!r}: it knows {', '.join(sorted(known))}", where)
    try:
        return inference_pb2.Tool(
            name=function.get("name") or "",
            description=function.get("description") or "",
            parameters_json="" if function.get("parameters") is None else json.dumps(function["parameters"]),
            strict=function.get("strict") or False,
        )
    except (TypeError, ValueError) as error:
        raise invalid(f"{where}.function has a value of a wrong type: {error}", where) from error


def _choice(choice: str | Mapping[str, Any] | None) -> inference_pb2.ToolChoice | None:
    if choice is None:
        return None
    if isinstance(choice, str) and choice in _MODES:
        return inference_pb2.ToolChoice(mode=_MODES[choice])
    function = choice.get("function") if isinstance(choice, Mapping) else None
    if isinstance(function, Mapping) and isinstance(function.get("name"), str):
        return inference_pb2.ToolChoice(function=function["name"])
    raise invalid(
        'tool_choice must be none, auto, required or {"type": "function", "function": {"name": …}}, '
        f"got {choice!r:.120}",
        "tool_choice",
    )
