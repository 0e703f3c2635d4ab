"""Forms of outputs, drawn from a seed: JSON schemas in the shapes that people send, and regular expressions.

The shapes follow those that JSONSchemaBench collects: calls of functions, settings of programs, records with formats
and bounds, definitions that refer to themselves, alternatives.
"""

import random
from typing import Any

_NAMES = ("id", "name", "title", "kind", "status", "tags", "items", "owner", "address", "count", "price", "created_at")
_WORDS = ("red", "green", "blue", "small", "large", "open", "closed", "n/a", "ünïcode", 'with "quotes"')
_FORMATS = ("date", "date-time", "time", "email", "uuid", "ipv4", "ipv6", "hostname", "uri")
_PATTERNS = (r"^[A-Z]{2,3}-[0-9]{4}$", r"^\d+(\.\d{1,2})?$", r"^(north|south)-[a-f]$", r"^[a-z_][a-z0-9_]{0,10}$")
# Keywords that no grammar can express, or that are rarely seen: some of the schemas have one.
_RARE: tuple[dict[str, Any], ...] = (
    {"uniqueItems": True},
    {"not": {"type": "null"}},
    {"patternProperties": {"^x-": {"type": "string"}}},
    {"propertyNames": {"pattern": "^[a-z]+$"}},
    {"minProperties": 1},
    {"if": {"type": "string"}, "then": {"minLength": 2}},
)
_SHARE_OF_RARE = 0.04


def random_schema(rng: random.Random) -> dict[str, Any]:
    """One whose top is an object."""
    schema = _object(rng, 3)
    if rng.random() < 0.2:
        schema["$defs"] = {"node": _node(rng)}
        schema["properties"]["tree"] = {"$ref": "#/$defs/node"}
    if rng.random() < _SHARE_OF_RARE:
        schema |= rng.choice(_RARE)
    return schema


def _node(rng: random.Random) -> dict[str, Any]:
    children = {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": rng.randint(1, 2)}
    return {
        "type": "object",
        "properties": {"value": _leaf(rng), "children": children},
        "required": ["value"],
        "additionalProperties": False,
    }


def _any(rng: random.Random, depth: int) -> dict[str, Any]:
    kinds = (_leaf, _leaf, _leaf) if depth == 0 else (_leaf, _leaf, _object, _array, _alternatives)
    kind = rng.choice(kinds)
    return kind(rng) if kind is _leaf else kind(rng, depth - 1)  # type: ignore[call-arg]


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(_NAMES, rng.randint(1, 5))
    schema: dict[str, Any] = {"type": "object", "properties": {name: _any(rng, depth) for name in names}}
    schema["required"] = [name for name in names if rng.random() < 0.7]
    if rng.random() < 0.8:
        schema["additionalProperties"] = False
    elif rng.random() < 0.5:
        schema["additionalProperties"] = {"type": "integer"}
    if rng.random() < 0.3:
        schema["description"] = "what people say of it"
    return schema


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    if rng.random() < 0.2:
        return {"type": "array", "prefixItems": [_leaf(rng), _leaf(rng)], "items": False, "minItems": 2}
    return {"type": "array", "items": _any(rng, depth), "minItems": rng.randint(0, 2), "maxItems": rng.randint(2, 5)}


def _alternatives(rng: random.Random, depth: int) -> dict[str, Any]:
    kinds = [_any(rng, depth), {"type": "null"}]
    return {"anyOf": kinds} if rng.random() < 0.8 else {"oneOf": [{"type": "string", "maxLength": 5}, {"type": "null"}]}


def _leaf(rng: random.Random) -> dict[str, Any]:
    low = rng.randint(-50, 50)
    return rng.choice(
        (
            lambda: {"type": "string", "maxLength": rng.randint(1, 40)},
            lambda: {"type": "string", "minLength": rng.randint(0, 3), "maxLength": rng.randint(3, 30)},
            lambda: {"type": "string", "pattern": rng.choice(_PATTERNS)},
            lambda: {"type": "string", "format": rng.choice(_FORMATS)},
            lambda: {"type": "string", "enum": rng.sample(_WORDS, rng.randint(1, 4))},
            lambda: {"enum": [1, "two", None, True]},
            lambda: {"const": rng.choice((*_WORDS, 7, False))},
            lambda: {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 1000)},
            lambda: {"type": "integer", "exclusiveMinimum": 0},
            lambda: {"type": "integer", "multipleOf": rng.choice((2, 5, 10))},
            lambda: {"type": "number", "minimum": 0, "maximum": rng.choice((1, 100))},
            lambda: {"type": "boolean"},
            lambda: {"type": ["string", "null"], "maxLength": 10},
        )
    )()


def random_regex(rng: random.Random) -> str:
    """One that Python's `re` understands as Rust's does."""
    return "".join(_piece(rng, 2) for _ in range(rng.randint(1, 5)))


def _piece(rng: random.Random, depth: int) -> str:
    low = rng.randint(0, 3)
    count = rng.choice(("", "?", f"{{{low},{low + rng.randint(0, 4)}}}", f"{{{max(1, low)}}}"))
    if depth and rng.random() < 0.3:
        return f"({'|'.join(_piece(rng, depth - 1) for _ in range(rng.randint(1, 3)))}){count}"
    return rng.choice((r"\d", r"\w", "[a-f0-9]", "[^a-z\\s]", "x", r"\.", "-", "é", "[A-Z]", " ")) + count
