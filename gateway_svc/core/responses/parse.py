"""The body of `POST /v1/responses`: JSON in, what to generate and what the reply repeats out."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from contract.domain.errors import invalid, unimplemented
from gateway_svc.core.ask import Ask, Form, Models
from gateway_svc.core.bodies import body_fields, decode_body, decode_messages
from gateway_svc.core.field_names import FieldName, beyond, in_words_of
from gateway_svc.core.formats.reading import OutputReading
from gateway_svc.core.openai import ask_chat
from gateway_svc.core.responses.fields import (
    RESPONSE_BODY,
    RESPONSE_FIELDS,
    UNSUPPORTED,
    TextOptions,
)
from gateway_svc.core.responses.input_items import as_messages
from gateway_svc.core.responses.tools import as_chat_choice, as_chat_tools
from gateway_svc.core.spelling import as_chat, response_format
from gateway_svc.core.unsupported import check_fields

MAX_REPEATED_BYTES = 64 * 1024  # of instructions and tools in a reply; it tells larger ones as none
LOGPROBS = "message.output_text.logprobs"
_INCLUDED = (LOGPROBS, "reasoning.encrypted_content")  # the latter asks for thoughts, which are told as they are
_NAMES = (
    FieldName("max_tokens", "max_output_tokens"),
    FieldName("messages", "input", is_whole=True),
    FieldName("continue_final_message", "input", is_whole=True),
    FieldName("response_format", "text.format"),
    FieldName("reasoning_effort", "reasoning.effort"),
    FieldName("logprobs", "include"),
    FieldName("tools[].function", "tools[]"),
    FieldName("tool_choice.function", "tool_choice"),
)
_decoder = msgspec.json.Decoder(RESPONSE_BODY)


def parse_response(body: bytes, models: Models) -> Ask:
    """The body of a call, where it says nothing with the defaults of its model.

    Raises:
        PenstockError: INVALID_ARGUMENT or UNIMPLEMENTED, naming the field; what `models` raises.
    """
    ignored = check_fields("response", body_fields(body), RESPONSE_FIELDS, UNSUPPORTED)
    raw: Any = decode_body(_decoder, body)
    if raw.input is None:
        raise invalid("input is missing: a text, or a list of items", "input")
    text, tools = raw.text or TextOptions(), as_chat_tools(raw.tools or [])
    if text.verbosity not in (None, "medium"):
        raise unimplemented("text.verbosity")
    items = raw.input if isinstance(raw.input, str) else decode_messages(raw.input, "input")
    with_logprobs = _wants_logprobs(raw)
    with in_words_of(_NAMES):
        chat = as_chat(
            raw,
            max_tokens=raw.max_output_tokens,
            tools=tools or None,
            tool_choice=as_chat_choice(raw.tool_choice),
            response_format=response_format(text.format),
            reasoning_effort=_effort(raw),
            logprobs=with_logprobs,
            top_logprobs=raw.top_logprobs if with_logprobs else None,
        )
        ask = ask_chat(chat, as_messages(raw.instructions, items), models.defaults, models.formats)
    return replace(
        ask,
        form=Form.RESPONSE,
        reading=ask.reading or OutputReading(),
        ignored_fields=ignored,
        names=beyond(ask.names, _NAMES),
        context=msgspec.json.encode(_context(raw, ask, tools)),
    )


def _wants_logprobs(raw: Any) -> bool:
    included: Sequence[str] = raw.include or ()
    if other := next((each for each in included if each not in _INCLUDED), None):
        raise unimplemented("include", f"include of {other[:80]!r}")
    if raw.top_logprobs and LOGPROBS not in included:
        raise invalid(f"top_logprobs is only told with include: [{LOGPROBS!r}]", "top_logprobs")
    return LOGPROBS in included


def _effort(raw: Any) -> str | None:
    reasoning = raw.reasoning
    if reasoning is None:
        return None
    for name in ("context", "mode"):
        if getattr(reasoning, name) not in (None, "auto", "standard"):
            raise unimplemented(f"reasoning.{name}")
    return str(reasoning.effort) if reasoning.effort is not None else None


def _context(raw: Any, ask: Ask, tools: list[dict[str, Any]]) -> dict[str, Any]:
    """The fields that the reply repeats."""
    shape = {"description": None, "parameters": None, "strict": False}
    told: dict[str, Any] = {"instructions": raw.instructions}
    told["tools"] = [{"type": "function", **shape, **each["function"]} for each in tools]
    if len(msgspec.json.encode(told)) > MAX_REPEATED_BYTES:
        told = {"instructions": None, "tools": []}
    reasoning = raw.reasoning
    return told | {
        "max_output_tokens": raw.max_output_tokens,
        "metadata": raw.metadata or {},
        "parallel_tool_calls": raw.parallel_tool_calls is not False,
        "reasoning": {"effort": reasoning and reasoning.effort, "summary": None},
        "temperature": ask.params.temperature,
        "text": {"format": (raw.text and raw.text.format) or {"type": "text"}, "verbosity": "medium"},
        "tool_choice": raw.tool_choice or "auto",
        "top_logprobs": raw.top_logprobs or 0,
        "top_p": ask.params.top_p,
        "user": raw.user,
    }
