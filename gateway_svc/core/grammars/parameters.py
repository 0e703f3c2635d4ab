"""The parameters of a function by its schema, for formats in which arguments are written one by one."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from contract.domain.errors import PenstockError, invalid
from gateway_svc.core.tools import Function

NOTES: Final = frozenset(
    ("title", "description", "examples", "default", "deprecated", "readOnly", "writeOnly", "$comment", "$schema", "$id")
)  # that say nothing of values
DEFINITIONS: Final = frozenset(("$defs", "definitions"))
_KNOWN = NOTES | DEFINITIONS | {"type", "properties", "required", "additionalProperties"}


@dataclass(frozen=True, slots=True)
class Parameter:
    """One of them."""

    name: str
    schema: Mapping[str, Any]
    is_required: bool


@dataclass(frozen=True, slots=True)
class Parameters:
    """All of them, in the order in which they are written."""

    named: tuple[Parameter, ...]
    others: Mapping[str, Any] | None  # the schema of further ones; None: there are none


def any_parameters() -> Parameters:
    """Those of a function whose arguments are not looked at."""
    return Parameters((), {})


def parameters_of(function: Function) -> Parameters:
    """Those of a function whose arguments are as its schema says.

    Raises:
        PenstockError: INVALID_ARGUMENT: the schema says what cannot be held to where arguments are written one by one.
    """
    schema = function.parameters
    if unknown := next((key for key in schema if key not in _KNOWN), None):
        raise unsayable(function, f"{unknown!r:.66} beside its properties")
    if schema.get("type", "object") != "object":
        raise unsayable(function, f"the type {schema['type']!r:.66} for all of them")
    _check_references(function, schema)
    shared = {key: schema[key] for key in DEFINITIONS if key in schema}
    others = _schema(function, schema.get("additionalProperties", True), shared)
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, Mapping) or not _are_texts(required):
        raise unsayable(function, "properties that are no object, or required ones that are no list of names")
    named = [*properties, *(name for name in dict.fromkeys(required) if name not in properties)]
    found = []
    for name in named:
        described = _schema(function, properties[name], shared) if name in properties else others
        if described is not None:
            found.append(Parameter(name, described, name in required))
        elif name in required:
            raise unsayable(function, f"{name!r:.66}, which is required and cannot be anything")
    return Parameters(tuple(found), others)


def unsayable(function: Function, what: str) -> PenstockError:
    """The error of a schema that the format of calls has no words for."""
    return invalid(
        f"the parameters of {function.name!r:.140} ask for {what}, which cannot be held to in the format in which "
        "this model calls functions: leave it out, or leave out what needs a grammar (strict, a tool_choice that is "
        "not auto)",
        "tools",
    )


def _schema(function: Function, schema: object, shared: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """A schema as an object, with what it may refer to; None: nothing is valid by it."""
    if isinstance(schema, bool):
        return {} if schema else None
    if not isinstance(schema, Mapping):
        raise unsayable(function, f"a schema that is no object: {schema!r:.66}")
    return {**schema, **shared} if any(True for _ in _references(schema)) else schema


def _check_references(function: Function, schema: Mapping[str, Any]) -> None:
    allowed = tuple(f"#/{each}/" for each in DEFINITIONS)
    for reference in _references(schema):
        if not isinstance(reference, str) or not reference.startswith(allowed):
            raise unsayable(function, f"the reference {reference!r:.66}, which is to none of its $defs")


def _references(schema: object) -> Iterable[object]:
    """All references in a schema."""
    if isinstance(schema, Mapping):
        for key, value in schema.items():
            if key == "$ref":
                yield value
            elif key not in ("enum", "const", "default", "examples"):
                yield from _references(value)
    elif isinstance(schema, list):
        for each in schema:
            yield from _references(each)


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)
