"""Arguments as keywords of a call in Python: values in JSON, and at the top also as Python has other words for them."""

import keyword
import unicodedata
from collections.abc import Iterable, Mapping
from typing import Any

from gateway_svc.core.grammars.parameters import DEFINITIONS, NOTES, Parameters, unsayable
from gateway_svc.core.grammars.terms import json_value, literal, one_of, terms
from gateway_svc.core.tools import Function

_NAME = "/[A-Za-z_][A-Za-z0-9_]{0,255}/"
_COMMA, _NOTHING = '", "', '""'
_WORDS = {"boolean": '"True" | "False"', "null": '"None"'}
_TEXT = r"""/'([^'\\\x00-\x1f]|\\[nrtbf'"\\])*'/"""  # between Python's other quotes


def python_arguments(name: str, function: Function, parameters: Parameters) -> Iterable[str]:
    """The rules of a function's arguments, the first of which has this name.

    Raises:
        PenstockError: INVALID_ARGUMENT: a parameter has a name that is none in Python.
    """
    named, rest, firsts = parameters.named, "", list[str]()  # what may follow, and what may come first
    if parameters.others is not None:
        yield from _others(name, parameters)
        rest, firsts = f"{name}_rest", [f"{name}_other {name}_rest"]
    for index, each in reversed(list(enumerate(named))):
        if not _is_name(each.name):
            raise unsayable(function, f"a parameter {each.name!r:.66}, which is no name in Python")
        one, mark = f"{name}_{index}", "" if each.is_required else "?"
        yield f"{one}: {literal(f'{each.name}=')} ({_value(each.schema)})"
        firsts = [terms(one, rest), *(() if each.is_required else firsts)]
        yield f"{name}_rest_{index}: {terms(f'({_COMMA} {one}){mark}', rest)}"
        rest = f"{name}_rest_{index}"
    must_be = any(each.is_required for each in named)
    yield f"{name}: ({' | '.join(firsts) or _NOTHING}){'' if must_be else '?'}"


def _others(name: str, parameters: Parameters) -> Iterable[str]:
    """The rules of parameters that have no names in the schema."""
    key = f"{name}_key".upper()
    yield f"{key}: {_NAME} & ~{one_of([*keyword.kwlist, *(each.name for each in parameters.named)])}"
    yield f'{name}_other: {key} "=" ({_value(parameters.others or {})})'
    yield f"{name}_rest: ({_COMMA} {name}_other)*"


def _value(schema: Mapping[str, Any]) -> str:
    """The ways to write a value."""
    return " | ".join(dict.fromkeys(_ways(schema)))


def _ways(schema: Mapping[str, Any]) -> Iterable[str]:
    said = schema.keys() - NOTES
    kind, shared = schema.get("type"), {key: schema[key] for key in DEFINITIONS if key in schema}
    if said - DEFINITIONS == {"anyOf"} and all(isinstance(each, Mapping) for each in schema["anyOf"]):
        for each in schema["anyOf"]:
            yield from _ways({**each, **shared})
    elif isinstance(kind, list) and not said & {"enum", "const"}:
        for one in kind:
            yield from _ways({**schema, "type": one})
    elif said == {"type"} and kind in _WORDS:
        yield _WORDS[kind]
    else:
        yield json_value(schema)
        yield from _quoted(schema, said)


def _quoted(schema: Mapping[str, Any], said: Iterable[str]) -> Iterable[str]:
    """The ways to write a text between Python's other quotes."""
    if schema.get("type", "string") != "string" or not {"type", "enum"}.issuperset(said):
        return
    members = schema.get("enum", [])
    if members and all(isinstance(each, str) for each in members):
        yield from (literal(repr(each)) for each in members)
    elif set(said) == {"type"}:
        yield _TEXT


def _is_name(text: str) -> bool:
    return text.isidentifier() and not keyword.iskeyword(text) and unicodedata.normalize("NFKC", text) == text
