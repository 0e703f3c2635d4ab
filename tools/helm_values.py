"""Makes values.schema.json and docs/values.md of the chart's values.yaml; with --check says whether they are stale.

The comment above a key is its description, and its default is its type, unless a line `@schema` of the comment adds
JSON. A mapping in braces or named in `_PASSED_ON` goes to Kubernetes as it is and stays open; every other one takes the
keys that it has there, and no others. The flags below `settings` are those that the services have.
"""

import argparse
import json
import sys
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml

from servicekit.settings import Option, ServiceSettings, options

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "deploy" / "helm" / "penstock"
SCHEMA = CHART / "values.schema.json"
REFERENCE = ROOT / "docs" / "values.md"
DEFAULTS = "defaults"
COMPONENTS = ("gateway", "tokenizer", "scheduler", "detokenizer", "worker")
# What the chart says itself, from other values.
_OWNED = frozenset(
    [
        "redis_url",
        "redis_password_file",
        "pool",
        "num_shards",
        "name",
        "grpc_address",
        "metrics_address",
        "health_address",
        "grpc_health_address",
        "tls_cert",
        "tls_key",
        "tls_client_ca",
        "control_token_file",
        "metrics_token_file",
        "http_address",
        "served_model_name",
        "api_keys_file",
        "pools",
        "model",
        "revision",
        "rank",
        "tensor_parallel_size",
        "distributed_address",
    ]
)

# Mappings that go to Kubernetes as they are.
_PASSED_ON = frozenset(
    [
        "workers",
        "resources",
        "podSecurityContext",
        "securityContext",
        "strategy",
        "annotations",
        "grpcAnnotations",
        "startup",
        "liveness",
        "readiness",
    ]
)

Schema = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Value:
    """One key of values.yaml."""

    name: str
    default: Any
    description: str
    extra: Schema
    children: "dict[str, Value]" = field(default_factory=dict)


def read_values(text: str) -> dict[str, Value]:
    """The keys of values.yaml.

    Raises:
        ValueError: a key has no comment.
    """
    root = yaml.compose(text, yaml.SafeLoader)
    if not isinstance(root, yaml.MappingNode):
        raise ValueError("values.yaml is no mapping")  # noqa: TRY004
    return _children(root, text.splitlines(), "")


def _children(node: yaml.MappingNode, lines: list[str], path: str) -> dict[str, Value]:
    found = {}
    for key, value in node.value:
        name = f"{path}{key.value}"
        description, extra = _comment(lines, key.start_mark.line)
        if not description and not path.startswith(tuple(f"{each}." for each in COMPONENTS)):
            raise ValueError(f"values.yaml: {name} has no comment above it")
        is_closed = isinstance(value, yaml.MappingNode) and not value.flow_style and key.value not in _PASSED_ON
        children = _children(value, lines, f"{name}.") if is_closed else {}
        default = None if children else yaml.SafeLoader("").construct_object(value, deep=True)
        found[key.value] = Value(key.value, default, description, extra, children)
    return found


def _comment(lines: list[str], line: int) -> tuple[str, Schema]:
    """The comment that ends above a line: its text, and what its `@schema` line adds."""
    texts: list[str] = []
    extra: Schema = {}
    for above in reversed(lines[:line]):
        stripped = above.strip()
        if not stripped.startswith("# "):
            break
        stripped = stripped.removeprefix("# ")
        if stripped.startswith("@schema "):
            extra = json.loads(stripped.removeprefix("@schema "))
        else:
            texts.insert(0, stripped)
    return " ".join(texts), extra


def schema_of(value: Value) -> Schema:
    """The JSON schema of a key."""
    described: Schema = {"description": value.description} if value.description else {}
    if "$ref" in value.extra:
        return {"allOf": [{"$ref": value.extra["$ref"]}], **described}
    if value.children:
        return described | _object({name: schema_of(each) for name, each in value.children.items()}) | value.extra
    types = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    inferred: Schema = {} if value.default is None else {"type": types[type(value.default)]}
    return described | inferred | value.extra


def _object(properties: Schema) -> Schema:
    return {"type": "object", "additionalProperties": False, "properties": properties}


def flags_schema(settings: type[ServiceSettings]) -> Schema:
    """The flags of a service that an operator may set; null: as if it were not there."""
    flags = {
        each.flag.removeprefix("--"): _flag(each) for each in options(settings).values() if each.name not in _OWNED
    }
    return _object(flags)


def _flag(option: Option) -> Schema:
    kinds = {_kind(each) for each in _members(option.type)}
    if option.choices:
        return {"description": option.help, "enum": [*option.choices, None]}
    return {"description": option.help, "type": sorted(kinds | {"null"})}


def _members(hint: Any) -> list[Any]:
    if get_origin(hint) is Annotated:
        return _members(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        return [each for member in get_args(hint) for each in _members(member)]
    return [hint]


def _kind(hint: Any) -> str:
    if get_origin(hint) in (tuple, list, frozenset):
        return "array"
    if get_origin(hint) is Literal:
        return "string"
    return {bool: "boolean", int: "integer", float: "number", NoneType: "null"}.get(hint, "string")


def settings_of(kind: str) -> type[ServiceSettings]:
    """The settings class of a service."""
    module = import_module(f"{kind}_svc.settings")
    found: type[ServiceSettings] = getattr(module, f"{kind.capitalize()}Settings")
    return found


def make_schema(values: dict[str, Value]) -> Schema:
    """The schema of the chart's values."""
    defaults = values[DEFAULTS]
    component = {name: schema_of(each) for name, each in defaults.children.items()}
    definitions: Schema = {"commonSettings": flags_schema(ServiceSettings)}
    for kind in COMPONENTS:
        own = {name: schema_of(each) for name, each in values[kind].children.items() if name not in defaults.children}
        definitions[kind] = _object(component | own | {"settings": flags_schema(settings_of(kind))})
    properties = {name: schema_of(each) for name, each in values.items()}
    properties[DEFAULTS] = _object(component | {"settings": flags_schema(ServiceSettings)})
    # Helm itself adds this to the values of charts.
    properties["global"] = {"type": "object", "description": "Values that Helm shares between charts; not used."}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of the Penstock chart",
        **_object(properties),
        "definitions": definitions,
    }


def make_reference(values: dict[str, Value], schema: Schema) -> str:
    """docs/values.md."""
    lines = [
        "# Values of the Helm chart",
        "",
        "Made by `python -m tools.helm_values` of `values.yaml` and of the services' settings: do not edit.",
        "A key that is not here is refused. [deploy.md](deploy.md) says how to use them.",
        "",
        "`gateway`, `tokenizer`, `scheduler`, `detokenizer`, `worker` and each of `workers` have those of `defaults`;",
        "`worker` and its groups have some more. Below `settings` are flags by their names, which are at the end.",
        "",
        "| key | type | default | what it is |",
        "|---|---|---|---|",
    ]
    for name, value in values.items():
        lines += _rows(name, value, schema["properties"][name], is_component=name in COMPONENTS)
    defaults = values[DEFAULTS].children
    own = {name: each for name, each in values["worker"].children.items() if name not in defaults}
    for name, value in own.items():
        lines += _rows(f"worker.{name}", value, schema["definitions"]["worker"]["properties"][name])
    lines += ["", "## What components say otherwise than `defaults`", "", "| component | values |", "|---|---|"]
    for kind in COMPONENTS:
        said = {name: _plain(each) for name, each in values[kind].children.items() if name not in own}
        lines.append(f"| `{kind}` | {_code(said)} |")
    for title, flags in [("all services", schema["definitions"]["commonSettings"])] + [
        (f"the {kind}", schema["definitions"][kind]["properties"]["settings"]) for kind in COMPONENTS
    ]:
        common = {} if title == "all services" else schema["definitions"]["commonSettings"]["properties"]
        lines += ["", f"## Flags of {title}", "", "| flag | type | what it is |", "|---|---|---|"]
        lines += [
            f"| `{name}` | {_type(each)} | {_cell(each['description'])} |"
            for name, each in flags["properties"].items()
            if name not in common
        ]
        if len(lines[-1]) < 20:
            lines.append("| none of its own | | |")
    return "\n".join(lines) + "\n"


def _rows(path: str, value: Value, schema: Schema, *, is_component: bool = False) -> list[str]:
    if is_component or not value.children:
        default = "" if is_component else _code(value.default)
        return [f"| `{path}` | {_type(schema)} | {default} | {_cell(value.description)} |"]
    rows = [f"| **`{path}`** | | | {_cell(value.description)} |"]
    for name, each in value.children.items():
        rows += _rows(f"{path}.{name}", each, schema.get("properties", {}).get(name, {}))
    return rows


def _plain(value: Value) -> Any:
    return {name: _plain(each) for name, each in value.children.items()} if value.children else value.default


def _type(schema: Schema) -> str:
    if "enum" in schema:
        return ", ".join(f"`{each}`" for each in schema["enum"] if each is not None)
    kind = schema.get("type", "object")
    return ", ".join(each for each in kind if each != "null") if isinstance(kind, list) else str(kind)


def _code(value: Any) -> str:
    return f"`{json.dumps(value, ensure_ascii=False)}`".replace("|", "\\|")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> int:
    """Entry point; the exit status is 1 if --check finds a difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only")
    check = parser.parse_args().check
    values = read_values((CHART / "values.yaml").read_text("utf-8"))
    schema = make_schema(values)
    files = {
        SCHEMA: json.dumps(schema, indent=1, ensure_ascii=False) + "\n",
        REFERENCE: make_reference(values, schema),
    }
    stale = [path for path, text in files.items() if not path.exists() or path.read_text("utf-8") != text]
    if check:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is out of date: run python -m tools.helm_values", file=sys.stderr)
        return 1 if stale else 0
    for path in stale:
        path.write_text(files[path], "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
