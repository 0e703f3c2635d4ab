"""The form of an output in OpenAI's words (`response_format`) and in vLLM's (`structured_outputs`, `guided_…`)."""

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from contract.domain.errors import invalid
from contract.domain.structured_outputs import StructuredOutputsParams, read_structured_outputs

_GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
_TAG_FIELDS = ("type", "structures", "triggers")  # of a structural tag as it was before it had a `format`
_SCHEMA_FIELDS = ("name", "description", "schema", "strict")


class FormFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a body that say the form of its outputs, beside `structured_outputs`."""

    response_format: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None


def read_form(raw: FormFields, structured_outputs: dict[str, Any] | None) -> StructuredOutputsParams | None:
    """The form that a body asks for; None: any will do.

    Raises:
        PenstockError: INVALID_ARGUMENT naming the field: it is none, or two of them say a form.
    """
    forms: dict[str, StructuredOutputsParams] = {}
    if raw.response_format is not None and (form := _of_format(raw.response_format)) is not None:
        forms["response_format"] = form
    if structured_outputs is not None:
        forms["structured_outputs"] = read_structured_outputs("structured_outputs", structured_outputs)
    forms |= {name: _of_guided(raw, name) for name in _GUIDED if getattr(raw, name) is not None}
    said = list(forms)
    if len(said) > 1:
        raise invalid(f"{said[0]} and {said[1]} exclude each other: both say the form of the output", said[1])
    if raw.guided_whitespace_pattern is not None and said != ["guided_json"]:
        raise invalid("guided_whitespace_pattern needs guided_json", "guided_whitespace_pattern")
    return forms[said[0]] if said else None


def form_field(raw: FormFields) -> str | None:
    """The name of the field that says the form, where it is another than `structured_outputs`."""
    return next((name for name in ("response_format", *_GUIDED) if getattr(raw, name) is not None), None)


def _of_guided(raw: FormFields, name: str) -> StructuredOutputsParams:
    value = {_GUIDED[name]: getattr(raw, name)}
    if name == "guided_json":
        value["whitespace_pattern"] = raw.guided_whitespace_pattern
    return read_structured_outputs(name, value)


def _of_format(value: dict[str, Any]) -> StructuredOutputsParams | None:
    match value.get("type"):
        case "text":
            _check_keys("response_format", value, ("type",))
            return None
        case "json_object":
            _check_keys("response_format", value, ("type",))
            return StructuredOutputsParams(json_object=True)
        case "json_schema":
            _check_keys("response_format", value, ("type", "json_schema"))
            described = value.get("json_schema")
            if not isinstance(described, dict) or not isinstance(described.get("schema"), dict):
                where = "response_format.json_schema.schema"
                raise invalid(f"{where} is missing: it must be a JSON schema, an object", where)
            _check_keys("response_format.json_schema", described, _SCHEMA_FIELDS)
            return read_structured_outputs("response_format", {"json": described["schema"]})
        case "structural_tag":
            _check_keys("response_format", value, ("type", "format") if "format" in value else _TAG_FIELDS)
            return read_structured_outputs("response_format", {"structural_tag": msgspec.json.encode(value).decode()})
        case other:
            raise invalid(
                f"response_format.type must be text, json_object, json_schema or structural_tag, got {other!r:.40}",
                "response_format.type",
            )


def _check_keys(where: str, value: Mapping[str, Any], known: Collection[str]) -> None:
    if unknown := [name for name in value if name not in known]:
        raise invalid(f"{where} has no field {unknown[0]!r:.66}: it knows {', '.join(known)}", where)
