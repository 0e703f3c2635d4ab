"""Chat messages as OpenAI's clients send them, checked and turned into the domain's."""

from typing import Any

from contract.domain.errors import PenstockError, invalid, unimplemented
from contract.domain.request import Message

MAX_MESSAGES = 4096
MAX_DEPTH = 64  # of what a chat template is given


def parse_messages(raw: list[dict[str, Any]]) -> tuple[Message, ...]:
    """Messages with a text, text parts or none as content; their other keys are kept for the chat template.

    Raises:
        PenstockError: INVALID_ARGUMENT or UNIMPLEMENTED naming the message and the part of it.
    """
    if not raw:
        raise invalid("messages must have at least one message", "messages")
    if len(raw) > MAX_MESSAGES:
        raise invalid(f"at most {MAX_MESSAGES} messages, got {len(raw)}", "messages")
    return tuple(_message(f"messages[{index}]", message) for index, message in enumerate(raw))


def check_depth(where: str, value: object) -> None:
    """Makes sure that values in values end somewhere: those who read them call themselves for each level.

    Raises:
        PenstockError: INVALID_ARGUMENT: lists and objects in each other beyond `MAX_DEPTH`.
    """
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for each in level
            for inner in (each.values() if isinstance(each, dict) else each if isinstance(each, list) else ())
        ]
        if not level:
            return
    raise invalid(f"{where} is nested more than {MAX_DEPTH} levels deep", where)


def _message(where: str, raw: dict[str, Any]) -> Message:
    role = raw.get("role")
    if not isinstance(role, str) or not role:
        raise invalid(f"{where}.role must be a string such as 'user'", f"{where}.role")
    extra = {key: value for key, value in raw.items() if key not in {"role", "content"} and value is not None}
    check_depth(where, extra)
    content = raw.get("content")
    if content is None and not extra:
        raise invalid(f"{where}.content is missing", f"{where}.content")
    return Message(role, _content(f"{where}.content", content), extra or None)


def _content(where: str, content: object) -> str | tuple[dict[str, Any], ...] | None:
    """A text, text parts, or none: only the chat template knows which of them it wants."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(f"{where} must be a string or a list of parts", where)
    check_depth(where, content)
    return tuple(_part(f"{where}[{index}]", part) for index, part in enumerate(content))


def _part(where: str, part: object) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise invalid(f"{where} must be an object with a type", where)
    if kind != "text":
        raise _other_part(where, kind)
    if not isinstance(part.get("text"), str):
        raise invalid(f"{where}.text must be a string", f"{where}.text")
    return part


def _other_part(where: str, kind: str) -> PenstockError:
    error = unimplemented(f"a message part of type {kind[:40]!r}")
    error.param = where
    return error
