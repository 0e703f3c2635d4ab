"""The messages of Anthropic's body, as messages of a chat."""

from collections.abc import Sequence
from typing import Any

import msgspec

from contract.domain.errors import PenstockError, invalid, unimplemented
from gateway_svc.core.messages import check_depth

_Parts = list[dict[str, str]]


def as_messages(system: str | Sequence[dict[str, Any]] | None, told: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages of a chat.

    Raises:
        PenstockError: INVALID_ARGUMENT or UNIMPLEMENTED naming the message and the block of it.
    """
    messages: list[dict[str, Any]] = []
    if system:
        messages.append({"role": "system", "content": text_content("system", system)})
    for index, message in enumerate(told):
        messages += _message(f"messages[{index}]", message)
    return messages


def is_begun(messages: Sequence[dict[str, Any]]) -> bool:
    """Return whether the answer has begun already, in a last message that the model goes on with.

    Raises:
        PenstockError: INVALID_ARGUMENT: that calls functions whose results are missing.
    """
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant":
        return False
    if "tool_calls" in last or not last.get("content"):
        raise invalid("the last message cannot be gone on with: give results of its calls, or a text", "messages")
    return True


def text_content(where: str, content: object) -> str | _Parts:
    """A text, or blocks of texts.

    Raises:
        PenstockError: INVALID_ARGUMENT or UNIMPLEMENTED: it is none.
    """
    if isinstance(content, str):
        return content
    return [_text_part(at, block) for at, block in _blocks(where, content)]


def _message(where: str, message: dict[str, Any]) -> list[dict[str, Any]]:
    check_depth(where, message)
    role, content = message.get("role"), message.get("content")
    match role:
        case "user":
            return _of_user(f"{where}.content", content)
        case "assistant":
            return [_of_model(f"{where}.content", content)]
        case "system":
            return [{"role": "system", "content": text_content(f"{where}.content", content)}]
    raise invalid(f"{where}.role must be user or assistant, got {role!r:.40}", f"{where}.role")


def _of_user(where: str, content: object) -> list[dict[str, Any]]:
    """Results of calls are messages of their own; what is said between two is one."""
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    found: list[dict[str, Any]] = []
    for at, block in _blocks(where, content):
        if block["type"] == "tool_result":
            found.append(_result(at, block))
        else:
            if not found or found[-1]["role"] != "user":
                found.append({"role": "user", "content": []})
            found[-1]["content"].append(_text_part(at, block))
    return found


def _result(where: str, block: dict[str, Any]) -> dict[str, Any]:
    content = block.get("content")
    told: dict[str, Any] = {"role": "tool", "tool_call_id": _string(where, block, "tool_use_id")}
    told["content"] = "" if content is None else text_content(f"{where}.content", content)
    return told | ({"is_error": True} if block.get("is_error") else {})


def _of_model(where: str, content: object) -> dict[str, Any]:
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    turn: dict[str, Any] = {"role": "assistant"}
    for at, block in _blocks(where, content):
        match block["type"]:
            case "thinking":
                turn["reasoning_content"] = turn.get("reasoning_content", "") + _string(at, block, "thinking")
            case "tool_use":
                turn.setdefault("tool_calls", []).append(_call(at, block))
            case _:
                turn.setdefault("content", []).append(_text_part(at, block))
    return turn


def _call(where: str, block: dict[str, Any]) -> dict[str, Any]:
    arguments = block.get("input", {})
    if not isinstance(arguments, dict):
        raise invalid(f"{where}.input must be an object", f"{where}.input")
    function = {"name": _string(where, block, "name"), "arguments": msgspec.json.encode(arguments).decode()}
    return {"id": _string(where, block, "id"), "type": "function", "function": function}


def _blocks(where: str, content: object) -> list[tuple[str, dict[str, Any]]]:
    """Blocks with where they are."""
    if not isinstance(content, list):
        raise invalid(f"{where} must be a string or a list of blocks", where)
    found = []
    for index, block in enumerate(content):
        at = f"{where}[{index}]"
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise invalid(f"{at} must be an object with a type", at)
        found.append((at, block))
    return found


def _text_part(where: str, block: dict[str, Any]) -> dict[str, str]:
    if block["type"] != "text":
        raise _other_block(where, block["type"])
    return {"type": "text", "text": _string(where, block, "text")}


def _other_block(where: str, kind: str) -> PenstockError:
    return unimplemented(f"{where}.type", f"a block of type {kind[:40]!r} ({where})")


def _string(where: str, block: dict[str, Any], key: str) -> str:
    value = block.get(key)
    if not isinstance(value, str):
        raise invalid(f"{where}.{key} must be a string", f"{where}.{key}")
    return value
