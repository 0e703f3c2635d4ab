"""A response as it is told: its items, the events of its stream, and the whole of it."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from contract.domain.errors import ErrorCode, Fault, PenstockError
from contract.domain.finish import FinishReason, Usage
from contract.domain.rows import TokenLogprob
from gateway_svc.core.formats.call_ids import call_id
from gateway_svc.core.formats.pieces import Kind
from gateway_svc.core.logprobs import chat_logprobs
from gateway_svc.core.part_ids import part_id
from gateway_svc.core.part_replies import Event
from gateway_svc.core.parts import Part, Parts
from gateway_svc.core.replies import ReplyHead

# Ends before an output was whole; the last in vLLM's word, as OpenAI has none.
_CUTS = {FinishReason.LENGTH: "max_output_tokens", FinishReason.REPETITION: "repetition"}
_LIMITS = (ErrorCode.OVERLOADED, ErrorCode.RATE_LIMIT_EXCEEDED)


class ResponseWriter:
    """Implements `part_replies.PartWriter`."""

    tells_numbers = True

    def __init__(self, head: ReplyHead, parts: Parts) -> None:
        self._head = head
        self._parts = parts
        self._context: dict[str, Any] = msgspec.json.decode(head.context) if head.context else {}
        self._items: dict[Kind, _Item] = {
            Kind.REASONING: _Thought(head, self._logprobs),
            Kind.CONTENT: _Message(head, self._logprobs),
            Kind.CALL: _Call(head, self._logprobs),
        }

    def learn(self, num_prompt_tokens: int) -> None:
        """Nothing to keep: the usage comes at the end."""

    def begin(self) -> Sequence[Event]:
        """Tell that it is there, and that it is computed."""
        told = {"response": self._response("in_progress", [])}
        return [("response.created", told), ("response.in_progress", told)]

    def begin_part(self, part: Part) -> Sequence[Event]:
        """An item, and its content if it has parts."""
        return self._items[part.kind].begin(part)

    def grow(self, part: Part, text: str, start: int, end: int) -> Event:
        """More of its content."""
        return self._items[part.kind].grow(part, text, start, end)

    def end_part(self, part: Part) -> Sequence[Event]:
        """The whole of its content, and of the item."""
        return self._items[part.kind].end(part)

    def end(self, usage: Usage) -> Sequence[Event]:
        """The whole response."""
        whole = self.reply(usage)
        return [(f"response.{whole['status']}", {"response": whole})]

    def fail(self, error: PenstockError) -> Sequence[Event]:
        """The error as Penstock has it, and the response that failed."""
        told = {"code": error.code.name.lower(), "message": error.message, "param": error.param}
        failed = self._response("failed", self._output()) | {"error": _error(error)}
        return [("error", told), ("response.failed", {"response": failed})]

    def reply(self, usage: Usage) -> dict[str, Any]:
        """The whole response."""
        cut = _CUTS.get(self._parts.finish)
        whole = self._response("completed" if cut is None else "incomplete", self._output())
        whole["incomplete_details"] = None if cut is None else {"reason": cut}
        whole["usage"] = self._usage(usage)
        return whole

    def _output(self) -> list[dict[str, Any]]:
        return [self._items[part.kind].whole(part) for part in self._parts.all]

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        head = self._head
        return {
            "id": head.call_id,
            "object": "response",
            "created_at": head.created_s,
            "status": status,
            "model": head.model,
            "output": output,
            "error": None,
            "incomplete_details": None,
            "usage": None,
            "background": False,
            "previous_response_id": None,
            "store": False,
            "service_tier": "default",
            "truncation": "disabled",
            **self._context,
        }

    def _usage(self, usage: Usage) -> dict[str, Any]:
        prompt, output = usage.num_prompt_tokens, usage.num_output_tokens
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": usage.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": output,
            "output_tokens_details": {"reasoning_tokens": self._parts.num_reasoning_tokens or 0},
            "total_tokens": prompt + output,
        }

    def _logprobs(self, start: int, end: int) -> list[dict[str, Any]]:
        found: Iterable[TokenLogprob] = self._parts.logprobs_of(start, end) if self._head.wants_logprobs else ()
        content: list[dict[str, Any]] = chat_logprobs(found, as_ids=self._head.tokens_as_ids)["content"]
        return content


class _Item:
    """The items of one kind."""

    prefix = ""  # of their ids
    content_event = ""  # with which their content grows

    def __init__(self, head: ReplyHead, logprobs: Callable[[int, int], list[dict[str, Any]]]) -> None:
        self._head = head
        self._logprobs = logprobs

    def whole(self, part: Part) -> dict[str, Any]:
        """The item with all that is in it."""
        return self._item(part, "completed" if part.is_whole else "incomplete", self._contents(part))

    def begin(self, part: Part) -> list[Event]:
        """The item, and its content if it has parts, both empty."""
        item = self._item(part, "in_progress", self._no_contents(part))
        return [("response.output_item.added", {"output_index": part.index, "item": item})]

    def grow(self, part: Part, text: str, start: int, end: int) -> Event:
        """More of its content."""
        del start, end
        return f"response.{self.content_event}.delta", {**self._at(part), "delta": text}

    def end(self, part: Part) -> list[Event]:
        """The item as a whole."""
        return [("response.output_item.done", {"output_index": part.index, "item": self.whole(part)})]

    def _at(self, part: Part) -> dict[str, Any]:
        return {"item_id": part_id(self.prefix, self._head.request_id, part.index), "output_index": part.index}

    def _item(self, part: Part, status: str, contents: Any) -> dict[str, Any]:
        raise NotImplementedError

    def _contents(self, part: Part) -> Any:
        raise NotImplementedError

    def _no_contents(self, part: Part) -> Any:
        del part
        return []


class _Call(_Item):
    """Calls of functions: what grows are their arguments."""

    prefix, content_event = "fc_", "function_call_arguments"

    def end(self, part: Part) -> list[Event]:
        arguments = {**self._at(part), "arguments": part.text}
        return [("response.function_call_arguments.done", arguments), *super().end(part)]

    def _item(self, part: Part, status: str, contents: Any) -> dict[str, Any]:
        called = call_id(self._head.request_id, 0, part.call)
        names = {"type": "function_call", "id": self._at(part)["item_id"], "call_id": called, "name": part.name}
        return {**names, "arguments": contents, "status": status}

    def _contents(self, part: Part) -> Any:
        return part.text

    def _no_contents(self, part: Part) -> Any:
        del part
        return ""


class _Texts(_Item):
    """Items whose content is one part with a text."""

    def begin(self, part: Part) -> list[Event]:
        return [*super().begin(part), ("response.content_part.added", self._content_event(part, ""))]

    def grow(self, part: Part, text: str, start: int, end: int) -> Event:
        kind, told = super().grow(part, text, start, end)
        return kind, {**told, "content_index": 0}

    def end(self, part: Part) -> list[Event]:
        done = {**self._at(part), "content_index": 0, "text": part.text}
        return [
            (f"response.{self.content_event}.done", done | self._beside_text(part)),
            ("response.content_part.done", self._content_event(part, part.text)),
            *super().end(part),
        ]

    def _contents(self, part: Part) -> Any:
        return [self._content(part, part.text)]

    def _content_event(self, part: Part, text: str) -> dict[str, Any]:
        return {**self._at(part), "content_index": 0, "part": self._content(part, text)}

    def _content(self, part: Part, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def _beside_text(self, part: Part) -> dict[str, Any]:
        del part
        return {}


class _Thought(_Texts):
    """Thoughts, as they are: there is no summary of them."""

    prefix, content_event = "rs_", "reasoning_text"

    def _item(self, part: Part, status: str, contents: Any) -> dict[str, Any]:
        names = {"type": "reasoning", "id": self._at(part)["item_id"], "summary": []}
        return {**names, "content": contents, "encrypted_content": None, "status": status}

    def _content(self, part: Part, text: str) -> dict[str, Any]:
        del part
        return {"type": "reasoning_text", "text": text}


class _Message(_Texts):
    """Words for the user, with logprobs if they were asked for."""

    prefix, content_event = "msg_", "output_text"

    def grow(self, part: Part, text: str, start: int, end: int) -> Event:
        kind, told = super().grow(part, text, start, end)
        return kind, {**told, "logprobs": self._logprobs(start, end)}

    def _item(self, part: Part, status: str, contents: Any) -> dict[str, Any]:
        names = {"type": "message", "id": self._at(part)["item_id"], "role": "assistant"}
        return {**names, "content": contents, "status": status}

    def _content(self, part: Part, text: str) -> dict[str, Any]:
        logprobs = self._logprobs(part.start, part.end) if text else []
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _beside_text(self, part: Part) -> dict[str, Any]:
        return {"logprobs": self._logprobs(part.start, part.end)}


def _error(error: PenstockError) -> dict[str, str]:
    """An error in the few codes that a failed response may have."""
    if error.code in _LIMITS:
        code = "rate_limit_exceeded"
    else:
        code = "invalid_prompt" if error.fault is Fault.CALLER else "server_error"
    return {"code": code, "message": error.message}
