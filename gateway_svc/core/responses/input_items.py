"""The items of a response's input, as messages of a chat."""

from collections.abc import Sequence
from typing import Any

from contract.domain.errors import PenstockError, invalid, unimplemented
from gateway_svc.core.messages import check_depth

_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}  # types, and their field
_ROLES = ("user", "assistant", "system", "developer")


class Conversation:
    """Messages in the making: thoughts, words and calls of one turn of the model are one message."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._turn: dict[str, Any] | None = None  # the model's, if it has the word

    def add(self, where: str, item: dict[str, Any]) -> None:
        """Take the next item, which stands there.

        Raises:
            PenstockError: INVALID_ARGUMENT or UNIMPLEMENTED naming what is wrong.
        """
        check_depth(where, item)
        match item.get("type", "message"):
            case "message":
                self._message(where, item)
            case "reasoning":
                self._thought(where, item)
            case "function_call":
                self._call(where, item)
            case "function_call_output":
                self._output(where, item)
            case "item_reference":
                raise _refused(where, "a reference to a stored item")
            case other:
                raise _refused(f"{where}.type", f"an input item of type {str(other)[:40]!r}")

    def say(self, role: str, content: str | list[dict[str, str]]) -> None:
        """Add a message of somebody who is not the model."""
        self._turn = None
        self.messages.append({"role": role, "content": content})

    def _message(self, where: str, item: dict[str, Any]) -> None:
        role = item.get("role")
        if role not in _ROLES:
            raise invalid(f"{where}.role must be one of {', '.join(_ROLES)}, got {role!r:.40}", f"{where}.role")
        content = text_content(f"{where}.content", item.get("content"))
        if role != "assistant":
            self.say(role, content)
        else:
            self._turn_without("content")["content"] = content

    def _thought(self, where: str, item: dict[str, Any]) -> None:
        parts = item.get("content") or item.get("summary") or []
        if not parts and item.get("encrypted_content"):
            raise _refused(f"{where}.encrypted_content", "a thought that is encrypted")
        texts = [_text(f"{where}.content", each, {"reasoning_text": "text", "summary_text": "text"}) for each in parts]
        if texts:
            turn = self._turn_without("reasoning_content", "content", "tool_calls")
            turn["reasoning_content"] = "\n".join(texts)

    def _call(self, where: str, item: dict[str, Any]) -> None:
        call_id, name, arguments = (_string(where, item, key) for key in ("call_id", "name", "arguments"))
        calls = self._turn_without().setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})

    def _output(self, where: str, item: dict[str, Any]) -> None:
        call_id = _string(where, item, "call_id")
        content = text_content(f"{where}.output", item.get("output"))
        self.say("tool", content)
        self.messages[-1]["tool_call_id"] = call_id

    def _turn_without(self, *keys: str) -> dict[str, Any]:
        """The model's turn, or a new one if it has one of these already."""
        if self._turn is None or any(key in self._turn for key in keys):
            self._turn = {"role": "assistant"}
            self.messages.append(self._turn)
        return self._turn


def text_content(where: str, content: object) -> str | list[dict[str, str]]:
    """A content of texts, as chats have it.

    Raises:
        PenstockError: INVALID_ARGUMENT or UNIMPLEMENTED: it is none.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(f"{where} must be a string or a list of parts", where)
    return [{"type": "text", "text": _text(f"{where}[{index}]", part, _TEXTS)} for index, part in enumerate(content)]


def as_messages(instructions: str | None, items: str | Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages of a response's input after its instructions.

    Raises:
        PenstockError: INVALID_ARGUMENT or UNIMPLEMENTED naming the item and the part of it.
    """
    told = Conversation()
    if instructions:
        told.say("system", instructions)
    if isinstance(items, str):
        told.say("user", items)
    else:
        for index, item in enumerate(items):
            told.add(f"input[{index}]", item)
    return told.messages


def _text(where: str, part: object, known: dict[str, str]) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise invalid(f"{where} must be an object with a type", where)
    if kind not in known:
        raise _refused(f"{where}.type", f"a part of type {kind[:40]!r}")
    return _string(where, part, known[kind])


def _string(where: str, item: dict[str, Any], key: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise invalid(f"{where}.{key} must be a string", f"{where}.{key}")
    return value


def _refused(where: str, what: str) -> PenstockError:
    return unimplemented(where, f"{what} ({where})")
