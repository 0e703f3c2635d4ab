"""A request's messages in the form in which chat templates expect them."""

import json
from collections.abc import Sequence
from typing import Any

from contract.domain.errors import invalid
from contract.domain.request import Message

Conversation = list[dict[str, Any]]

REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")  # templates and clients name the same thing differently


def conversation(messages: Sequence[Message], *, keeps_parts: bool, knows_developer: bool = True) -> Conversation:
    """Messages as dicts without keys that are null; what a model thought is under the names that templates read.

    keeps_parts: text parts stay a list; else they are joined by line breaks.
    knows_developer: the role `developer` stays; else it is `system`, its older name.
    """
    told = [_as_dict(message, keeps_parts=keeps_parts) for message in messages]
    if knows_developer:
        return told
    return [{**each, "role": "system"} if each["role"] == "developer" else each for each in told]


def _as_dict(message: Message, *, keeps_parts: bool) -> dict[str, Any]:
    told: dict[str, Any] = {"role": message.role}
    if isinstance(message.content, str):
        told["content"] = message.content
    elif message.content is not None:
        texts = [part["text"] for part in message.content]
        told["content"] = [dict(part) for part in message.content] if keeps_parts else "\n".join(texts)
    told |= {key: value for key, value in (message.extra or {}).items() if value is not None}
    thought = next((told[key] for key in REASONING_KEYS if key in told), None)
    return told if thought is None else {"thinking": thought, **told, "reasoning_content": thought}


def with_objects(messages: Conversation) -> Conversation:
    """The same, with the arguments of tool calls, which OpenAI's API has as JSON in a string, as objects.

    Raises:
        PenstockError: INVALID_ARGUMENT naming the arguments that are no JSON object.
    """
    return [_with_objects(f"messages[{index}]", message) for index, message in enumerate(messages)]


def _with_objects(where: str, message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    found = [_called_with_object(f"{where}.tool_calls[{index}].function", call) for index, call in enumerate(calls)]
    return {**message, "tool_calls": found}


def _called_with_object(where: str, call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(arguments, str):
        return call
    # A call without arguments is an empty string to some clients.
    return {**call, "function": {**function, "arguments": _object(f"{where}.arguments", arguments)}}


def _object(where: str, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError) as error:
        raise invalid(f"{where} must be a JSON object in a string: {error}", where) from error
    if not isinstance(found, dict):
        raise invalid(f"{where} must be a JSON object in a string, got {text!r:.80}", where)
    return found


def with_joined_thoughts(messages: Conversation) -> Conversation:
    """The same, with what is said beside calls of functions as the end of the thought before them, if there is one."""
    return [_with_joined_thought(message) for message in messages]


def _with_joined_thought(message: dict[str, Any]) -> dict[str, Any]:
    thought, said = message.get(REASONING_KEYS[0]), message.get("content")
    if not message.get("tool_calls") or not isinstance(thought, str) or not thought or not said:
        return message
    texts = [said] if isinstance(said, str) else [part["text"] for part in said]
    joined = "\n\n".join((thought, *texts))
    return {**message, "content": "", **{key: joined for key in REASONING_KEYS if key in message}}


def with_null_contents(messages: Conversation) -> Conversation:
    """The same, with a null content where there was none."""
    return [{"content": None, **message} for message in messages]
