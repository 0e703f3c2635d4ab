"""The functions that a model may call, and whether it must, as OpenAI's clients say it."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from contract.domain.errors import invalid
from gateway_svc.core.messages import check_depth

MAX_TOOLS = 1024
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_FUNCTION_FIELDS = ("name", "description", "parameters", "strict")
NO_CHOICE, AUTO_CHOICE, REQUIRED = "none", "auto", "required"


@dataclass(frozen=True, slots=True)
class ToolFields:
    """The fields of a body that are about calls of functions."""

    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None


@dataclass(frozen=True, slots=True)
class Function:
    """One function."""

    name: str
    parameters: Mapping[str, Any]  # JSON schema of its arguments, an object
    is_strict: bool  # the arguments are as the schema says

    @property
    def texts(self) -> tuple[str, ...]:
        """Its parameters that are texts whatever stands in them."""
        properties = self.parameters.get("properties")
        if not isinstance(properties, Mapping):
            return ()
        return tuple(name for name, each in properties.items() if isinstance(each, Mapping) and _is_text(each))


def _is_text(schema: Mapping[str, Any]) -> bool:
    members = schema.get("enum")
    if isinstance(members, list) and members:
        return all(isinstance(each, str) for each in members)
    return schema.get("type") == "string"


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The functions that a call may use; at least one."""

    functions: tuple[Function, ...]
    must_call: bool = False  # at least one of them
    is_single: bool = False  # at most one is called

    @property
    def is_strict(self) -> bool:
        """Return whether the arguments of some function must be as its schema says."""
        return any(each.is_strict for each in self.functions)

    def is_bound(self, function: Function) -> bool:
        """Return whether the arguments of one of them must be as its schema says."""
        return self.must_call or function.is_strict


def read_tools(raw: ToolFields) -> ToolUse | None:
    """The use of functions that a body asks for; None: none is to be called.

    Raises:
        PenstockError: INVALID_ARGUMENT naming the field.
    """
    functions = _functions(raw.tools or [])
    choice, named = _choice(raw.tool_choice)
    if not functions:
        if choice == REQUIRED:
            raise invalid("tool_choice is given, but no tools", "tool_choice")
        return None
    if choice == NO_CHOICE:
        return None
    if named:
        functions = [each for each in functions if each.name == named]
        if not functions:
            raise invalid(f"tool_choice names {named!r:.140}, which is none of tools", "tool_choice")
    is_single = bool(named) or raw.parallel_tool_calls is False
    return ToolUse(tuple(functions), must_call=choice == REQUIRED, is_single=is_single)


def _choice(raw: str | dict[str, Any] | None) -> tuple[str, str]:
    """The choice of functions: none, any, or the one that must be called."""
    if raw is None:
        return AUTO_CHOICE, ""
    if isinstance(raw, str) and raw in (NO_CHOICE, AUTO_CHOICE, REQUIRED):
        return raw, ""
    if isinstance(raw, dict) and raw.get("type") == "function":
        function = raw.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if isinstance(name, str) and name:
            return REQUIRED, name
    raise invalid(
        'tool_choice must be none, auto, required or {"type": "function", "function": {"name": …}}, '
        f"got {msgspec.json.encode(raw).decode():.120}",
        "tool_choice",
    )


def _functions(raw: Sequence[dict[str, Any]]) -> list[Function]:
    if len(raw) > MAX_TOOLS:
        raise invalid(f"at most {MAX_TOOLS} tools, got {len(raw)}", "tools")
    functions = [_function(f"tools[{index}]", each) for index, each in enumerate(raw)]
    names = [each.name for each in functions]
    if twice := next((name for index, name in enumerate(names) if name in names[:index]), None):
        raise invalid(f"tools has two functions {twice!r}", "tools")
    return functions


def _function(where: str, raw: dict[str, Any]) -> Function:
    if raw.get("type") != "function":
        raise invalid(f"{where}.type must be 'function', got {raw.get('type')!r:.40}", f"{where}.type")
    described = raw.get("function")
    if not isinstance(described, dict):
        raise invalid(f"{where}.function is missing", f"{where}.function")
    where = f"{where}.function"
    check_depth(where, described)
    if unknown := [name for name in described if name not in _FUNCTION_FIELDS]:
        known = ", ".join(_FUNCTION_FIELDS)
        raise invalid(f"{where} has no field {unknown[0]!r:.66}: it knows {known}", f"{where}.{unknown[0][:64]}")
    name, parameters, strict = described.get("name"), described.get("parameters"), described.get("strict")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise invalid(f"{where}.name must be 1 to 128 of A-Z a-z 0-9 _ . : / -, got {name!r:.140}", f"{where}.name")
    if not isinstance(parameters, dict | None):
        raise invalid(f"{where}.parameters must be a JSON schema, an object", f"{where}.parameters")
    if not isinstance(strict, bool | None):
        raise invalid(f"{where}.strict must be true or false", f"{where}.strict")
    return Function(name, parameters or {}, bool(strict))
