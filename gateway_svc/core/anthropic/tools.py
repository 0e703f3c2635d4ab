"""The tools of Anthropic's body, as chats have them."""

from collections.abc import Sequence
from typing import Any

from contract.domain.errors import invalid, unimplemented

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_FIELDS = ("name", "description", "input_schema", "strict")
_HINTS = ("type", "cache_control", "eager_input_streaming")  # that change no output
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "defer_loading": (False,),
    "allowed_callers": (["direct"],),
    "input_examples": ([],),
}


def as_chat_tools(tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Functions as chats have them.

    Raises:
        PenstockError: UNIMPLEMENTED: a tool of another kind; INVALID_ARGUMENT: no schema, a field that nobody knows.
    """
    return [_tool(f"tools[{index}]", each) for index, each in enumerate(tools)]


def as_chat_choice(choice: dict[str, Any] | None) -> str | dict[str, Any] | None:
    """The choice among them as chats have it.

    Raises:
        PenstockError: INVALID_ARGUMENT: it is none.
    """
    if choice is None:
        return None
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if kind not in _CHOICES:
        raise invalid(f"tool_choice.type must be auto, any, tool or none, got {kind!r:.40}", "tool_choice.type")
    return _CHOICES[kind]


def calls_several(choice: dict[str, Any] | None) -> bool | None:
    """Return whether several functions may be called; None: nothing is said.

    Raises:
        PenstockError: INVALID_ARGUMENT: what is said is neither true nor false.
    """
    disabled = None if choice is None else choice.get("disable_parallel_tool_use")
    if not isinstance(disabled, bool | None):
        where = "tool_choice.disable_parallel_tool_use"
        raise invalid(f"{where} must be true or false", where)
    return None if disabled is None else not disabled


def _tool(where: str, raw: dict[str, Any]) -> dict[str, Any]:
    if raw.get("type", "custom") not in (None, "custom"):
        raise unimplemented(f"{where}.type", f"a tool of type {raw['type']!r:.40} ({where})")
    if not isinstance(raw.get("input_schema"), dict):
        raise invalid(f"{where}.input_schema must be a JSON schema, an object", f"{where}.input_schema")
    for name, value in raw.items():
        if name in _NEUTRAL:
            if value is not None and value not in _NEUTRAL[name]:
                raise unimplemented(f"{where}.{name}")
        elif name not in _FIELDS and name not in _HINTS:
            raise invalid(f"{where} has no field {name!r:.66}: it knows {', '.join(_FIELDS)}", f"{where}.{name[:64]}")
    said = {name: raw[name] for name in _FIELDS if raw.get(name) is not None}
    said["parameters"] = said.pop("input_schema")
    return {"type": "function", "function": said}
