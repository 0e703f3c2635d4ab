"""The form that an output must have, under vLLM's names."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

from contract.domain.errors import invalid

MAX_FORM_BYTES = 64 * 1024  # of a schema, expression, grammar or of all choices together
MAX_CHOICES = 1024
JSON_FORMS: Final = ("json", "json_object")
_GUIDANCE = "x-guidance"  # the key of a schema under which it says how it is followed
# White space between JSON's tokens as people set it, a blank or a new line and what indents it, and no more: a model
# that likes white space would write nothing else until its last token.
JSON_WHITE_SPACE: Final = r" ?|\r?\n[ \t]{0,32}"
FORMS: Final = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """The form of an output: exactly one of the first six says it.

    Raises:
        PenstockError: INVALID_ARGUMENT naming the field: none or several say it, or one is not of its type or too long.
    """

    json: str | Mapping[str, Any] | None = None  # a JSON schema, as text or as an object; kept as text
    json_object: bool | None = None  # any JSON object
    regex: str | None = None  # of the whole output, in the syntax of Rust's regex crate, without look-around
    choice: Sequence[str] | None = None  # one of these texts
    grammar: str | None = None  # in Lark's syntax, with a rule `start`, or in GBNF's, with a rule `root`
    # JSON text: {"format": {"type": …}} or {"structures": [{"begin", "schema", "end"}], "triggers": [text]}
    structural_tag: str | None = None
    disable_any_whitespace: bool = False  # JSON has no white space between its tokens
    whitespace_pattern: str | None = None  # expression of the white space that JSON may have between its tokens

    def __post_init__(self) -> None:
        if isinstance(self.json, Mapping):
            object.__setattr__(self, "json", _as_text(self.json))
        if isinstance(self.choice, Sequence) and not isinstance(self.choice, str):
            object.__setattr__(self, "choice", tuple(self.choice))
        if len(said := self._said) != 1:
            found = " and ".join(said) or "none"
            raise _wrong(f"structured_outputs takes exactly one of {', '.join(FORMS)}, got {found}")
        for name in ("json_object", "disable_any_whitespace"):
            if not isinstance(getattr(self, name), bool | None):
                raise _wrong(f"{name} must be true or false, got {getattr(self, name)!r:.80}", name)
        for name in ("json", "regex", "grammar", "structural_tag", "whitespace_pattern"):
            _check_text(name, getattr(self, name))
        if self.choice is not None:
            _check_choices(self.choice)
        for name in ("json", "structural_tag"):
            _check_object(name, getattr(self, name))
        if self.said not in JSON_FORMS and (self.disable_any_whitespace or self.whitespace_pattern is not None):
            name = "disable_any_whitespace" if self.disable_any_whitespace else "whitespace_pattern"
            raise _wrong(f"{name} is of JSON only, and {self.said} is given", name)

    @property
    def said(self) -> str:
        """The field that says the form: one of `FORMS`."""
        return self._said[0]

    @property
    def _said(self) -> list[str]:
        return [name for name in FORMS if getattr(self, name) not in (None, False)]


def spaced_schema(form: StructuredOutputsParams) -> dict[str, Any]:
    """The schema of one of `JSON_FORMS`, with what white space it may have in llguidance's words.

    Raises:
        PenstockError: INVALID_ARGUMENT: it says itself how it is followed, and not in an object.
    """
    schema: dict[str, Any] = {"type": "object"} if form.json is None else json.loads(str(form.json))
    white_space: dict[str, Any] = {"whitespace_flexible": False}
    if not form.disable_any_whitespace:
        pattern = JSON_WHITE_SPACE if form.whitespace_pattern is None else form.whitespace_pattern
        white_space = {"whitespace_flexible": True, "whitespace_pattern": pattern}
    stated = schema.get(_GUIDANCE, {})
    if not isinstance(stated, dict):
        raise _wrong(f"{_GUIDANCE} must be an object, got {stated!r:.80}", form.said)
    return schema | {_GUIDANCE: white_space | stated}


@dataclass(frozen=True, slots=True)
class Structured:
    """The kind of the parameter `structured_outputs`."""

    json = dict[str, Any]
    bounds = f"up to {MAX_FORM_BYTES // 1024} KiB"

    def check(self, name: str, value: Any) -> None:
        """Implement `Kind.check`."""
        if value is not None and not isinstance(value, StructuredOutputsParams):
            raise invalid(f"{name} must be StructuredOutputsParams, got {value!r:.80}", name)

    def read(self, value: Any) -> Any:
        """Implement `Kind.read`."""
        return value


def read_structured_outputs(where: str, value: Mapping[str, Any]) -> StructuredOutputsParams:
    """The form that a JSON object says; `where` is what it is called in errors. A field that is null says nothing.

    Raises:
        PenstockError: INVALID_ARGUMENT naming the field.
    """
    known = {each.name for each in fields(StructuredOutputsParams)}
    if unknown := [name for name in value if name not in known]:
        raise invalid(f"{where} has no field {unknown[0]!r:.66}: it knows {', '.join(sorted(known))}", where)
    return StructuredOutputsParams(**{name: each for name, each in value.items() if each is not None})


def _wrong(message: str, name: str = "") -> Exception:
    return invalid(message, f"structured_outputs.{name}" if name else "structured_outputs")


def _as_text(schema: Mapping[str, Any]) -> str:
    try:
        return json.dumps(schema, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise _wrong(f"the JSON schema cannot be written as JSON: {error}", "json") from error


def _check_text(name: str, text: object) -> None:
    if text is None:
        return
    if not isinstance(text, str) or not text:
        raise _wrong(f"{name} must be a text that is not empty, got {text!r:.80}", name)
    _check_size(name, text)


def _check_size(name: str, text: str) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise _wrong(f"{name} is not valid Unicode: it holds half of a surrogate pair", name) from error
    if size > MAX_FORM_BYTES:
        raise _wrong(f"{name} may have at most {MAX_FORM_BYTES} bytes, got {size}", name)


def _check_choices(choices: object) -> None:
    if not isinstance(choices, tuple) or not all(isinstance(each, str) and each for each in choices):
        raise _wrong(f"choice must be a list of texts that are not empty, got {choices!r:.80}", "choice")
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise _wrong(f"choice must have 1 to {MAX_CHOICES} texts, got {len(choices)}", "choice")
    _check_size("choice", "".join(choices))


def _check_object(name: str, text: str | None) -> None:
    if text is None:
        return
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _wrong(f"{name} must be a JSON object: {error}", name) from error
    if not isinstance(found, dict):
        raise _wrong(f"{name} must be a JSON object, got {text:.80}", name)
