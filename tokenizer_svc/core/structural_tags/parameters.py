"""Arguments as Qwen's coders write them: `<parameter=name>` and a value, a text as it is and others as JSON."""

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from tokenizer_svc.core.structural_tags.parts import Either, Free, Json, Part, Parts, Repeated, Text, wrong_tag

_CLOSES: Final = "</parameter>"
_NOTES = frozenset(
    ("title", "description", "examples", "default", "deprecated", "readOnly", "writeOnly", "$comment", "$schema", "$id")
)
_DEFINITIONS = ("$defs", "definitions")
_KNOWN = {*_NOTES, *_DEFINITIONS, "type", "properties", "required", "additionalProperties"}
_NO_TEXTS = frozenset(("integer", "number", "boolean", "null", "array", "object"))


def read_parameters(where: str, schema: Mapping[str, Any], json_of: Callable[[str, Mapping[str, Any]], Json]) -> Parts:
    """The parts of arguments by their schema; others than its properties there are none.

    Args:
        where: the schema's place in the structural tag.
        schema: of an object.
        json_of: makes parts of values that are JSON.

    Raises:
        PenstockError: INVALID_ARGUMENT: the schema says what cannot be followed where values are no JSON.
    """
    if unknown := next((key for key in schema if key not in _KNOWN), None):
        raise wrong_tag(where, f"{unknown!r:.66} cannot be followed beside properties that are no JSON")
    if schema.get("type", "object") != "object" or schema.get("additionalProperties", False) is not False:
        raise wrong_tag(where, "it must be of an object without additionalProperties")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        raise wrong_tag(where, "its properties must be an object, and required ones a list")
    if missing := [name for name in required if name not in properties]:
        raise wrong_tag(where, f"{missing[0]!r:.66} is required and no property")
    shared = {key: schema[key] for key in _DEFINITIONS if key in schema}
    parts: list[Part] = []
    for name, described in properties.items():
        one = _parameter(f"{where}.properties.{name[:40]}", name, described, shared, json_of)
        parts += one if name in required else [Repeated(where, one, "?")]
    return parts


def _parameter(
    where: str, name: str, schema: object, shared: Mapping[str, Any], json_of: Callable[[str, Mapping[str, Any]], Json]
) -> Parts:
    if not name or ">" in name:
        raise wrong_tag(where, "such a name cannot be written")
    opens = Text(f"<parameter={name}>", has_blank=True)
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        raise wrong_tag(where, "it must be a JSON schema that something is valid by")
    kinds = schema.get("type", ())
    kinds = {kinds} if isinstance(kinds, str) else set(kinds) if isinstance(kinds, list | tuple) else {"?"}
    if kinds and kinds <= _NO_TEXTS:
        value = json_of(where, {**schema, **shared})
        return [opens, Text("", has_blank=True), value, Text(_CLOSES, has_blank=True)]
    if kinds > {"string"} or not kinds <= {"string"}:
        raise wrong_tag(where, "it must be of type string, or of others that are JSON")
    if unknown := next((key for key in schema if key not in {*_NOTES, "type", "enum", "const"}), None):
        raise wrong_tag(where, f"{unknown!r:.66} cannot be followed of a text that is no JSON")
    if (values := _values(schema)) is None:
        return [opens, Free(where), Text(_CLOSES)]
    texts = [each if isinstance(each, str) else json.dumps(each, ensure_ascii=False) for each in values]
    if not texts or any(_CLOSES in each for each in texts):
        raise wrong_tag(where, f"its values must be one at least, without {_CLOSES}")
    return [opens, Either(where, tuple([Text(each)] if each else [] for each in texts)), Text(_CLOSES)]


def _values(schema: Mapping[str, Any]) -> list[Any] | None:
    """The values that it names; None: any."""
    if "const" in schema:
        return [schema["const"]]
    found = schema.get("enum")
    return found if isinstance(found, list) else None
