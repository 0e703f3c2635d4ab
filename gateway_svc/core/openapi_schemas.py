"""The schemas of the description of the HTTP API: those of structs, under the names that they have there."""

from collections.abc import Sequence
from typing import Any

import msgspec

from contract.domain.parameter import Integer, Kind, Number
from contract.domain.params import PARAMETERS

_REF = "#/components/schemas/{name}"
# What structs are called in the description, where that is something else; and what in them must be given.
_NAMES = {"_CompletionBody": "CompletionCall", "ChatBody": "ChatCall", "_StreamOptions": "StreamOptions"}
_NAMES |= {"TokenizeBody": "TokenizeCall", "DetokenizeBody": "DetokenizeCall"}
_NAMES |= {"EmbeddingBody": "EmbeddingCall", "ScoreBody": "ScoreCall", "RerankBody": "RerankCall"}
_NAMES |= {"_ResponseBody": "ResponseCall", "Reasoning": "ReasoningOptions", "_MessageBody": "MessageCall"}
_REQUIRED = {
    "CompletionCall": ["prompt"],
    "ChatCall": ["messages"],
    "DetokenizeCall": ["tokens"],
    "ResponseCall": ["input"],
    "ScoreCall": ["text_1", "text_2"],
    "RerankCall": ["query", "documents"],
    "MessageCall": ["messages", "max_tokens"],
}
_CHATS = ("ChatCall", "TokenizeCall", "EmbeddingCall")  # whose messages are a chat's
_MESSAGE = {
    "title": "ChatMessage",
    "description": "A message; further keys go to the chat template.",
    "type": "object",
    "properties": {
        "role": {"type": "string", "minLength": 1},
        "content": {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                        "required": ["type", "text"],
                    },
                },
                {"type": "null"},
            ]
        },
    },
    "required": ["role", "content"],
}


def schema(of: Any) -> dict[str, Any]:
    """The schema of a struct, by its name here; one that is a schema already is itself."""
    return of if isinstance(of, dict) else {"$ref": _REF.format(name=schema_name(of.__name__))}


def schema_name(name: str) -> str:
    """The name of a struct in the description."""
    return _NAMES.get(name, name)


def schemas_of(structs: Sequence[type]) -> dict[str, Any]:
    """The schemas of structs and of all that is in them, by their names here, ascending."""
    _, found = msgspec.json.schema_components(structs, ref_template=_REF)
    schemas = {schema_name(name): _renamed(each) for name, each in found.items()}
    schemas["ChatMessage"] = _MESSAGE
    for name, each in schemas.items():
        each["title"] = name
        if name.endswith("Call"):
            each["required"] = _REQUIRED.get(name, [])
            _explain(each["properties"], has_chat=name in _CHATS)
    return dict(sorted(schemas.items()))


def _renamed(value: Any) -> Any:
    """A schema whose references have the names that structs have here."""
    if isinstance(value, list):
        return [_renamed(each) for each in value]
    if not isinstance(value, dict):
        return value
    if "$ref" in value:
        return {"$ref": _REF.format(name=schema_name(value["$ref"].rpartition("/")[2]))}
    return {key: _renamed(each) for key, each in value.items()}


def _explain(properties: dict[str, Any], *, has_chat: bool) -> None:
    """Describe parameters as their table does, and the messages of a chat as they must be."""
    for name, each in properties.items():
        if name == "messages" and has_chat:
            each["anyOf"][0] |= {"items": {"$ref": _REF.format(name="ChatMessage")}, "minItems": 1}
        if (parameter := PARAMETERS.get(name)) is not None:
            each["description"] = ", ".join(filter(None, (parameter.meaning, parameter.kind.bounds)))
            if each["anyOf"][0].get("type") in ("integer", "number"):  # a chat's `logprobs` is neither
                each["anyOf"][0] |= _bounds(parameter.kind)


def _bounds(kind: Kind) -> dict[str, float]:
    if not isinstance(kind, Integer | Number):
        return {}
    least = "exclusiveMinimum" if isinstance(kind, Number) and kind.open_low else "minimum"
    return {least: kind.low, "maximum": kind.high}
