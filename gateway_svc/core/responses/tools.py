"""The functions of a response's body, as chats have them."""

from collections.abc import Sequence
from typing import Any

from contract.domain.errors import invalid, unimplemented

_FIELDS = ("name", "description", "parameters", "strict")
# Of functions: what asks for nothing beyond what is done anyway.
_NEUTRAL: dict[str, tuple[Any, ...]] = {"defer_loading": (False,), "allowed_callers": (["direct"],), "async": (False,)}


def as_chat_tools(tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Functions as chats have them.

    Raises:
        PenstockError: UNIMPLEMENTED: a tool of another kind; INVALID_ARGUMENT: a field that nobody knows.
    """
    return [_tool(f"tools[{index}]", each) for index, each in enumerate(tools)]


def as_chat_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    """The choice among them as chats have it.

    Raises:
        PenstockError: UNIMPLEMENTED: a choice of another kind of tool; INVALID_ARGUMENT: it has no name.
    """
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") != "function":
        raise unimplemented("tool_choice.type", f"a tool_choice of type {choice.get('type')!r:.40}")
    if not isinstance(name := choice.get("name"), str):
        raise invalid('tool_choice of one function is {"type": "function", "name": …}', "tool_choice")
    return {"type": "function", "function": {"name": name}}


def _tool(where: str, raw: dict[str, Any]) -> dict[str, Any]:
    if raw.get("type") != "function":
        raise unimplemented(f"{where}.type", f"a tool of type {raw.get('type')!r:.40} ({where})")
    function = {}
    for name, value in raw.items():
        if name in _FIELDS:
            if value is not None:
                function[name] = value
        elif name in _NEUTRAL:
            if value is not None and value not in _NEUTRAL[name]:
                raise unimplemented(f"{where}.{name}")
        elif name != "type":
            raise invalid(f"{where} has no field {name!r:.66}: it knows {', '.join(_FIELDS)}", f"{where}.{name[:64]}")
    return {"type": "function", "function": function}
