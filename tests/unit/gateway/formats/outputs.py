"""Outputs as models of each family write them, and what is told of them."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from gateway_svc.core.formats.output_format import OutputFormat
from gateway_svc.core.formats.pieces import Kind, Piece
from gateway_svc.core.formats.reading import reader_of
from gateway_svc.core.formats.registry import REASONING_FORMATS, TOOL_FORMATS
from gateway_svc.core.formats.table import ReasoningFormat


@dataclass
class Told:
    """All that pieces say."""

    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)  # name and arguments

    def add(self, pieces: Iterable[Piece]) -> "Told":
        for piece in pieces:
            match piece.kind:
                case Kind.REASONING:
                    self.reasoning += piece.text
                case Kind.CONTENT:
                    self.content += piece.text
                case Kind.CALL:
                    self.calls.append((piece.text, ""))
                case Kind.ARGUMENTS:
                    name, arguments = self.calls[-1]
                    self.calls[-1] = name, arguments + piece.text
        return self


def thoughts_of(name: str) -> ReasoningFormat:
    """The format of thoughts that goes with one of calls."""
    return REASONING_FORMATS.get(name, REASONING_FORMATS["think"])


def form(name: str, **more: object) -> OutputFormat:
    """That of a family, with its thoughts."""
    texts = {"f": frozenset({"path", "text"})}
    return OutputFormat(TOOL_FORMATS[name], thoughts_of(name), hidden=("<|im_end|>",), texts=texts, **more)  # type: ignore[arg-type]


def read(form: OutputFormat, parts: Sequence[str]) -> Told:
    """The pieces that are told of a text that comes in parts."""
    reader = reader_of(form)
    told = Told()
    for part in parts:
        told.add(reader.feed(part))
    return told.add(reader.end())


A, B = {"path": "a.py", "n": 1}, {"path": 'say "}</x>"', "list": [1, {"k": [None, True]}]}
CALLS = [("f", json.dumps(A)), ("g", json.dumps(B))]


def _objects(key: str = "arguments") -> list[str]:
    return [json.dumps({"name": name, key: json.loads(arguments)}) for name, arguments in CALLS]


# Name of the format → two calls of `CALLS`, each family's way of saying them.
SPELLINGS: dict[str, list[str]] = {
    "hermes": ["\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in _objects())],
    "llama3_json": ["; ".join(_objects("parameters")), "<|python_tag|>" + ";".join(_objects("parameters"))],
    "mistral": [
        f"[TOOL_CALLS] [{', '.join(_objects())}]",
        "".join(f"[TOOL_CALLS]{name}[ARGS]{arguments}" for name, arguments in CALLS),
        "".join(f"[TOOL_CALLS]{name}[CALL_ID]a1B[ARGS]{arguments}" for name, arguments in CALLS),
        "".join(f"[TOOL_CALLS]{name}{arguments}" for name, arguments in CALLS),
    ],
    "pythonic": [
        """[f(path="a.py", n=1), g(path='say "}</x>"', list=[1, {'k': [None, True]}])]""",
        """<|python_start|>[f(path='a.py', n=1), g(path='say "}</x>"', list=[1, {"k": [null, true]}])]<|python_end|>""",
    ],
    "deepseek": [
        "<｜tool▁calls▁begin｜>"
        + "\n".join(
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"
            for name, arguments in CALLS
        )
        + "<｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜>"
        + "".join(
            f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>" for name, arguments in CALLS
        )
        + "<｜tool▁calls▁end｜>",
    ],
    "harmony": [
        "<|start|>assistant".join(
            f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>"
            for name, arguments in CALLS
        ),
        "<|start|>assistant".join(
            f" to=functions.{name}<|channel|>commentary json<|message|>{arguments}<|end|>" for name, arguments in CALLS
        ),
    ],
    "glm": [
        "<tool_call>f\n<arg_key>path</arg_key>\n<arg_value>a.py</arg_value>\n<arg_key>n</arg_key>\n<arg_value>1"
        '</arg_value>\n</tool_call>\n<tool_call>g\n<arg_key>path</arg_key>\n<arg_value>say "}</x>"</arg_value>\n'
        '<arg_key>list</arg_key>\n<arg_value>[1, {"k": [null, true]}]</arg_value>\n</tool_call>'
    ],
}
THOUGHTS = {"harmony": "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"}  # of formats with others
EXAMPLES = [(name, spelling) for name, spellings in SPELLINGS.items() for spelling in spellings]
