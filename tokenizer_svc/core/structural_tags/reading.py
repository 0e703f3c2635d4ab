"""Structural tags by xgrammar's names, read and checked.

Source: https://xgrammar.mlc.ai/docs/tutorials/structural_tag.html
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from llguidance import grammar_from, regex_to_lark

from contract.domain.errors import PenstockError
from contract.domain.structured_outputs import StructuredOutputsParams, spaced_schema
from tokenizer_svc.core.structural_tags.parameters import read_parameters
from tokenizer_svc.core.structural_tags.parts import (
    Either,
    Free,
    Grammar,
    Json,
    Parts,
    Regex,
    Repeated,
    Tag,
    Text,
    Triggered,
    ends_free,
    wrong_tag,
)

MAX_DEPTH: Final = 64  # of formats in formats
_ASCII = "dws"  # digits, words and white space are ASCII's, as in JSON schemas
_STYLES = ("json", "qwen_xml")


class TagReader:
    """Reads formats; `where` is the place of each in the structural tag."""

    def __init__(self) -> None:
        """Nothing is read yet."""
        self._depth = 0
        self._kinds: Mapping[str, Callable[[str, dict[str, Any]], Parts]] = {
            "const_string": self._const_string,
            "json_schema": self._json_schema,
            "qwen_xml_parameter": self._qwen_parameters,
            "regex": self._regex,
            "grammar": self._grammar,
            "any_text": self._any_text,
            "sequence": self._sequence,
            "or": self._or,
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._tags_with_separator,
            "optional": self._repeated,
            "star": self._repeated,
            "plus": self._repeated,
        }

    def read(self, where: str, raw: object) -> Parts:
        """The parts that a format describes.

        Raises:
            PenstockError: INVALID_ARGUMENT naming the place: it is none, or says what cannot be followed.
        """
        if not isinstance(raw, dict) or not isinstance(raw.get("type"), str):
            raise wrong_tag(where, "a format must be an object with a `type`")
        if (read := self._kinds.get(raw["type"])) is None:
            raise wrong_tag(where, f"type {raw['type']!r:.40} is not done: there are {', '.join(self._kinds)}")
        if self._depth == MAX_DEPTH:
            raise wrong_tag(where, f"formats may stand {MAX_DEPTH} deep in each other")
        self._depth += 1
        try:
            return read(where, raw)
        finally:
            self._depth -= 1

    @staticmethod
    def _const_string(where: str, raw: dict[str, Any]) -> Parts:
        _check_keys(where, raw, ("value",))
        return _text(_string(where, raw, "value"))

    @staticmethod
    def _json_schema(where: str, raw: dict[str, Any]) -> Parts:
        _check_keys(where, raw, ("json_schema", "style"))
        style = raw.get("style", _STYLES[0])
        if style not in _STYLES:
            raise wrong_tag(f"{where}.style", f"{style!r:.40} is not done: there are {', '.join(_STYLES)}")
        schema = _schema(where, raw)
        if style == _STYLES[0]:
            return (_json(f"{where}.json_schema", schema),)
        return read_parameters(f"{where}.json_schema", schema, _json)

    @staticmethod
    def _qwen_parameters(where: str, raw: dict[str, Any]) -> Parts:
        _check_keys(where, raw, ("json_schema",))
        return read_parameters(f"{where}.json_schema", _schema(where, raw), _json)

    @staticmethod
    def _regex(where: str, raw: dict[str, Any]) -> Parts:
        _check_keys(where, raw, ("pattern",))
        try:
            return (Regex(regex_to_lark(_string(where, raw, "pattern"), _ASCII)),)
        except ValueError as error:
            raise wrong_tag(f"{where}.pattern", error) from error

    @staticmethod
    def _grammar(where: str, raw: dict[str, Any]) -> Parts:
        _check_keys(where, raw, ("grammar",))
        text = _string(where, raw, "grammar")
        if "%llguidance" in text:
            raise wrong_tag(f"{where}.grammar", "%llguidance is not taken: how a grammar is followed is decided here")
        try:
            return (Grammar(grammar_from("grammar", text)),)
        except Exception as error:  # whatever its parser of GBNF raises
            raise wrong_tag(f"{where}.grammar", error) from error

    @staticmethod
    def _any_text(where: str, raw: dict[str, Any]) -> Parts:
        _check_keys(where, raw, ("excludes", "excluded_str"))
        return (Free(where, _excluded(where, raw)),)

    def _sequence(self, where: str, raw: dict[str, Any]) -> Parts:
        _check_keys(where, raw, ("elements",))
        elements = _list(where, raw, "elements")
        return [part for index, each in enumerate(elements) for part in self.read(f"{where}.elements[{index}]", each)]

    def _or(self, where: str, raw: dict[str, Any]) -> Parts:
        _check_keys(where, raw, ("elements",))
        elements = _list(where, raw, "elements")
        options = [self.read(f"{where}.elements[{index}]", each) for index, each in enumerate(elements)]
        return (Either(where, tuple(options)),)

    def _tag(self, where: str, raw: dict[str, Any]) -> Parts:
        _check_keys(where, raw, ("begin", "content", "end"))
        begin, end = _string(where, raw, "begin"), raw.get("end")
        content = self.read(f"{where}.content", raw.get("content"))
        if isinstance(end, list) and end and all(isinstance(each, str) for each in end):
            return [*_text(begin), Either(where, tuple([*content, *_text(each)] for each in end))]
        return [*_text(begin), *content, *_text(_string(where, raw, "end"))]

    def _triggered_tags(self, where: str, raw: dict[str, Any]) -> Parts:
        _check_keys(where, raw, ("triggers", "tags", "at_least_one", "stop_after_first", "excludes"))
        triggers = _strings(f"{where}.triggers", _list(where, raw, "triggers"))
        _check_apart(f"{where}.triggers", triggers)
        tags = []
        for index, each in enumerate(_list(where, raw, "tags")):
            at = f"{where}.tags[{index}]"
            parts = self._closed_tag(at, each)
            found = [trigger for trigger in triggers if each["begin"].startswith(trigger)]
            if len(found) != 1:
                raise wrong_tag(at, f"one trigger must be the beginning of {each['begin']!r:.80}, got {len(found)}")
            tags.append(Tag(found[0], parts))
        flags = (_flag(where, raw, "at_least_one"), _flag(where, raw, "stop_after_first"))
        return (Triggered(where, tuple(tags), *flags, _excluded(where, raw)),)

    def _tags_with_separator(self, where: str, raw: dict[str, Any]) -> Parts:
        _check_keys(where, raw, ("tags", "separator", "at_least_one", "stop_after_first"))
        given = _list(where, raw, "tags")
        tags = [self._closed_tag(f"{where}.tags[{index}]", each) for index, each in enumerate(given)]
        one, separator = Either(where, tuple(tags)), _text(_string(where, raw, "separator"))
        several: Parts = [one]
        if not _flag(where, raw, "stop_after_first"):
            several = [one, Repeated(where, [*separator, one], "*")]
        return several if _flag(where, raw, "at_least_one") else (Repeated(where, several, "?"),)

    def _repeated(self, where: str, raw: dict[str, Any]) -> Parts:
        _check_keys(where, raw, ("content",))
        content = self.read(f"{where}.content", raw.get("content"))
        return (Repeated(where, content, {"optional": "?", "star": "*", "plus": "+"}[raw["type"]]),)

    def _closed_tag(self, where: str, raw: object) -> Parts:
        """A tag among others, which need not say that it is one, and must have an end."""
        if not isinstance(raw, dict) or raw.setdefault("type", "tag") != "tag":
            raise wrong_tag(where, "it must be a tag, an object with `begin`, `content` and `end`")
        parts = self.read(where, raw)
        if ends_free(parts):
            raise wrong_tag(where, "free text in a tag needs an `end` after it")
        return parts


def _json(where: str, schema: Mapping[str, Any]) -> Json:
    try:
        return Json(spaced_schema(StructuredOutputsParams(json=schema)))
    except PenstockError as error:
        raise wrong_tag(where, error.message) from error


def _schema(where: str, raw: dict[str, Any]) -> Mapping[str, Any]:
    schema = raw.get("json_schema")
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise wrong_tag(f"{where}.json_schema", "it must be a JSON schema that something is valid by")
    return schema


def _text(text: str) -> Parts:
    return (Text(text),) if text else ()


def _string(where: str, raw: dict[str, Any], key: str) -> str:
    if not isinstance(value := raw.get(key), str):
        raise wrong_tag(f"{where}.{key}", "it must be a text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise wrong_tag(f"{where}.{key}", "it holds half of a surrogate pair") from error
    return value


def _strings(where: str, values: list[Any]) -> tuple[str, ...]:
    if not all(isinstance(each, str) and each for each in values):
        raise wrong_tag(where, "they must be texts that are not empty")
    return tuple(values)


def _list(where: str, raw: dict[str, Any], key: str) -> list[Any]:
    if not isinstance(value := raw.get(key), list) or not value:
        raise wrong_tag(f"{where}.{key}", "it must be a list that is not empty")
    return value


def _flag(where: str, raw: dict[str, Any], key: str) -> bool:
    if not isinstance(value := raw.get(key, False), bool):
        raise wrong_tag(f"{where}.{key}", "it must be true or false")
    return value


def _excluded(where: str, raw: dict[str, Any]) -> tuple[str, ...]:
    """By the name of today, and by the one before."""
    key = "excludes" if "excludes" in raw else "excluded_str"
    values = raw.get(key) or []
    if not isinstance(values, list):
        raise wrong_tag(f"{where}.{key}", "it must be a list of texts")
    return _strings(f"{where}.{key}", values)


def _check_apart(where: str, texts: tuple[str, ...]) -> None:
    """Makes sure that none of several texts that end a free one hides another."""
    for index, each in enumerate(texts):
        if hidden := next((other for at, other in enumerate(texts) if at != index and each in other), None):
            raise wrong_tag(where, f"{each!r:.40} stands in {hidden!r:.40}, which could never come")


def _check_keys(where: str, raw: Mapping[str, Any], known: Collection[str]) -> None:
    if unknown := next((key for key in raw if key not in known and key != "type"), None):
        raise wrong_tag(where, f"{raw['type']} has no field {unknown!r:.66}: it knows {', '.join(known)}")


def read_structural_tag(tag: Mapping[str, Any]) -> Parts:
    """The parts of a whole output.

    Raises:
        PenstockError: INVALID_ARGUMENT naming the place that is wrong.
    """
    if tag.get("type", "structural_tag") != "structural_tag":
        raise wrong_tag("type", "it must be structural_tag")
    if unknown := next((key for key in tag if key not in ("type", "format")), None):
        raise wrong_tag(unknown[:40], "beside `format` there is nothing but `type`")
    return TagReader().read("format", tag["format"])
