"""A message as it is told: its blocks, the events of its stream, and the whole of it."""

from collections.abc import Sequence
from typing import Any

import msgspec

from contract.domain.errors import PenstockError
from contract.domain.finish import FinishReason, Usage
from gateway_svc.core.anthropic.errors import message_error_fields
from gateway_svc.core.formats.call_ids import call_id
from gateway_svc.core.formats.pieces import Kind
from gateway_svc.core.part_ids import part_id
from gateway_svc.core.part_replies import Event
from gateway_svc.core.parts import Part, Parts
from gateway_svc.core.replies import ReplyHead

_DELTAS = {
    Kind.REASONING: ("thinking_delta", "thinking"),
    Kind.CONTENT: ("text_delta", "text"),
    Kind.CALL: ("input_json_delta", "partial_json"),
}


class MessageWriter:
    """Implements `part_replies.PartWriter`."""

    tells_numbers = False

    def __init__(self, head: ReplyHead, parts: Parts) -> None:
        self._head = head
        self._parts = parts
        self._num_prompt_tokens = 0

    def learn(self, num_prompt_tokens: int) -> None:
        """Take it for the beginning; how many of them were cached is told at the end."""
        self._num_prompt_tokens = num_prompt_tokens

    def begin(self) -> Sequence[Event]:
        """An empty message, and the first ping."""
        message = self._message([], Usage(num_prompt_tokens=self._num_prompt_tokens))
        return [("message_start", {"message": message}), ("ping", {})]

    def begin_part(self, part: Part) -> Sequence[Event]:
        """An empty block."""
        return [("content_block_start", {"index": part.index, "content_block": self._block(part, is_empty=True)})]

    def grow(self, part: Part, text: str, start: int, end: int) -> Event:
        """More of what is in it."""
        del start, end
        kind, name = _DELTAS[part.kind]
        return "content_block_delta", {"index": part.index, "delta": {"type": kind, name: text}}

    def end_part(self, part: Part) -> Sequence[Event]:
        """The end of a block, of a thought after its signature."""
        stop = "content_block_stop", {"index": part.index}
        if part.kind is not Kind.REASONING:
            return [stop]
        signed = {"type": "signature_delta", "signature": self._signature(part)}
        return [("content_block_delta", {"index": part.index, "delta": signed}), stop]

    def end(self, usage: Usage) -> Sequence[Event]:
        """Why it ended and what it used."""
        return [("message_delta", {"delta": self._stop_fields(), "usage": self._usage(usage)}), ("message_stop", {})]

    def fail(self, error: PenstockError) -> Sequence[Event]:
        """The error, as replies have it."""
        return [("error", message_error_fields(error))]

    def reply(self, usage: Usage) -> dict[str, Any]:
        """The whole message."""
        return self._message([self._block(part) for part in self._parts.all], usage) | self._stop_fields()

    def _message(self, content: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        return {
            "id": self._head.call_id,
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(usage),
        }

    def _block(self, part: Part, *, is_empty: bool = False) -> dict[str, Any]:
        text = "" if is_empty else part.text
        match part.kind:
            case Kind.REASONING:
                return {"type": "thinking", "thinking": text, "signature": "" if is_empty else self._signature(part)}
            case Kind.CONTENT:
                return {"type": "text", "text": text}
        called = call_id(self._head.request_id, 0, part.call, "toolu_")
        return {"type": "tool_use", "id": called, "name": part.name, "input": _input(text)}

    def _signature(self, part: Part) -> str:
        """Clients want one; nobody here asks for it when the thought comes back."""
        return part_id("", self._head.request_id, part.index)

    def _stop_fields(self) -> dict[str, Any]:
        parts = self._parts
        if parts.finish is FinishReason.LENGTH:
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if isinstance(parts.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": parts.stop_reason}
        return {"stop_reason": "tool_use" if parts.num_calls else "end_turn", "stop_sequence": None}

    def _usage(self, usage: Usage) -> dict[str, Any]:
        """The tokens of the prompt that were not cached, those that were, and those of the output."""
        thinking = self._parts.num_reasoning_tokens
        return {
            "input_tokens": usage.num_prompt_tokens - usage.num_cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.num_cached_tokens,
            "output_tokens": usage.num_output_tokens,
            **({} if thinking is None else {"output_tokens_details": {"thinking_tokens": thinking}}),
        }


def _input(arguments: str) -> Any:
    """The arguments of a call; what is no JSON stands as the text that the model wrote."""
    try:
        return msgspec.json.decode(arguments) if arguments.strip() else {}
    except (msgspec.DecodeError, RecursionError):
        return arguments
