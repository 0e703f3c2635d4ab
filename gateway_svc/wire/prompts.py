"""Prompts of gRPC clients."""

from typing import Any, TypeAlias

import msgspec

from contract.domain.errors import invalid
from contract.domain.request import Message, Prompt
from contract.v1 import inference_pb2, requests_pb2
from contract.wire.requests import decode_message, unpack_u32
from gateway_svc.core.field_names import FieldName
from gateway_svc.core.messages import MAX_MESSAGES, check_depth

PromptCall: TypeAlias = requests_pb2.GenerateRequest | inference_pb2.EmbedCall | inference_pb2.TokenizePromptCall


def decode_prompt(message: PromptCall) -> Prompt:
    """The prompt of a call.

    Raises:
        PenstockError: INVALID_ARGUMENT naming the field.
    """
    form = message.WhichOneof("prompt")
    if form in (None, "pair"):
        raise invalid("a request needs a prompt: text, token_ids or messages", "prompt")
    if form == "text":
        return Prompt(text=message.text)
    if form == "token_ids" and not isinstance(message, inference_pb2.TokenizePromptCall):
        ids = tuple(unpack_u32("token_ids.ids", message.token_ids.ids))
        if not ids:
            raise invalid("a prompt must have at least one token id", "token_ids")
        return Prompt(token_ids=ids)
    return _chat(message.messages)


def prompt_name(message: PromptCall) -> FieldName:
    """The field that gives the prompt, by the name of its form."""
    return FieldName("prompt", message.WhichOneof("prompt") or "prompt")


def _chat(chat: requests_pb2.ChatMessages) -> Prompt:
    if not chat.messages:
        raise invalid("messages must have at least one message", "messages")
    if len(chat.messages) > MAX_MESSAGES:
        raise invalid(f"at most {MAX_MESSAGES} messages, got {len(chat.messages)}", "messages")
    messages = tuple(_message(f"messages[{index}]", each) for index, each in enumerate(chat.messages))
    kwargs = _object("messages.template_kwargs_json", chat.template_kwargs_json)
    return Prompt(messages=messages, chat_template_kwargs=kwargs, required_variables=tuple(chat.required_variables))


def _message(where: str, each: requests_pb2.ChatMessage) -> Message:
    message = decode_message(where, each)
    parts = message.content if isinstance(message.content, tuple) else ()
    check_depth(where, [message.extra, *parts])
    return message


def _object(where: str, text: str) -> dict[str, Any] | None:
    if not text:
        return None
    try:
        found = msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise invalid(f"{where} must be a JSON object: {error}", where) from error
    check_depth(where, found)
    return found
