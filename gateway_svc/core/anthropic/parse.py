"""The body of `POST /v1/messages`: JSON in, what to generate out."""

from dataclasses import replace
from typing import Any

import msgspec

from contract.domain.errors import invalid
from gateway_svc.core.anthropic.conversation import as_messages, is_begun
from gateway_svc.core.anthropic.fields import MESSAGE_BODY, MESSAGE_FIELDS, UNSUPPORTED, OutputConfig
from gateway_svc.core.anthropic.thinking import check_thinking, thinking_budget, thinking_switches
from gateway_svc.core.anthropic.tools import as_chat_choice, as_chat_tools, calls_several
from gateway_svc.core.ask import Ask, Form, Models
from gateway_svc.core.bodies import body_fields, decode_body, decode_messages
from gateway_svc.core.field_names import FieldName, beyond, in_words_of
from gateway_svc.core.formats.reading import OutputReading
from gateway_svc.core.openai import ask_chat
from gateway_svc.core.spelling import as_chat, response_format
from gateway_svc.core.unsupported import check_fields

_NAMES = (
    FieldName("stop", "stop_sequences"),
    FieldName("messages", "messages", is_whole=True),
    FieldName("continue_final_message", "messages", is_whole=True),
    FieldName("response_format", "output_config.format"),
    FieldName("reasoning_effort", "output_config.effort"),
    FieldName("include_reasoning", "thinking.display"),
    FieldName("parallel_tool_calls", "tool_choice.disable_parallel_tool_use"),
    FieldName("tools[].function.parameters", "tools[].input_schema"),
    FieldName("tools[].function", "tools[]"),
    FieldName("tool_choice.function", "tool_choice"),
)
_BUDGET = FieldName("thinking_token_budget", "thinking.budget_tokens")
DEFAULT_EFFORT = "high"  # Anthropic's own: who says it asks for nothing else than who does not
_decoder = msgspec.json.Decoder(MESSAGE_BODY)


def parse_message(body: bytes, models: Models) -> Ask:
    """The body of a call, where it says nothing with the defaults of its model.

    Raises:
        PenstockError: INVALID_ARGUMENT or UNIMPLEMENTED, naming the field; what `models` raises.
    """
    ask = parse_prompt(body, models)
    if "max_tokens" in ask.unsaid or ask.params.max_tokens is None:
        raise invalid("max_tokens is missing: say how many tokens the answer may have", "max_tokens")
    return ask


def parse_prompt(body: bytes, models: Models) -> Ask:
    """The same of a body that need not say how long the answer may be."""
    ignored = check_fields("message", body_fields(body), MESSAGE_FIELDS, UNSUPPORTED)
    raw: Any = decode_body(_decoder, body)
    if not raw.messages:
        raise invalid("messages must have at least one message", "messages")
    check_thinking(raw.thinking, raw.max_tokens)
    messages = as_messages(raw.system, decode_messages(raw.messages))
    config = raw.output_config or OutputConfig()
    is_omitted = raw.thinking is not None and raw.thinking.display == "omitted"
    names = _NAMES if raw.thinking_token_budget is not None else (*_NAMES, _BUDGET)
    with in_words_of(names):
        chat = as_chat(
            raw,
            stop=raw.stop_sequences,
            tools=as_chat_tools(raw.tools or []) or None,
            tool_choice=as_chat_choice(raw.tool_choice),
            parallel_tool_calls=calls_several(raw.tool_choice),
            response_format=response_format(config.format),
            reasoning_effort=None if config.effort == DEFAULT_EFFORT else config.effort,
            chat_template_kwargs=_kwargs(raw, models),
            continue_final_message=is_begun(messages) or None,
            include_reasoning=False if is_omitted else None,
            thinking_token_budget=_thinking_budget(raw, models),
        )
        ask = ask_chat(chat, messages, models.defaults, models.formats)
    return replace(
        ask,
        form=Form.MESSAGE,
        reading=ask.reading or OutputReading(),
        ignored_fields=ignored,
        names=beyond(ask.names, names),
        continuous_usage=True,  # a stream begins with the tokens of its prompt
    )


def _thinking_budget(raw: Any, models: Models) -> int | None:
    """By Penstock's own name first."""
    said: int | None = raw.thinking_token_budget
    return thinking_budget(raw.thinking, models.formats(raw.model or "")) if said is None else said


def _kwargs(raw: Any, models: Models) -> dict[str, Any] | None:
    kwargs = dict(raw.chat_template_kwargs or {})
    if raw.output_config is not None and raw.output_config.effort == DEFAULT_EFFORT:
        kwargs.setdefault("reasoning_effort", DEFAULT_EFFORT)  # for templates that read it
    for name, value in thinking_switches(raw.thinking, models.formats(raw.model or "")).items():
        if kwargs.setdefault(name, value) != value:
            raise invalid(f"thinking and chat_template_kwargs.{name} contradict each other", "thinking")
    return kwargs or None
