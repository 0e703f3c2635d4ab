"""Calls in Python whose arguments are literals with names."""

import ast
import json
import re
from collections.abc import Iterable, Sequence

_BRACKETS = re.compile(r"[()\[\]{}'\"]")
_STRINGS = {quote: re.compile(rf"{quote}(?:[^{quote}\\]|\\.)*{quote}", re.DOTALL) for quote in "'\""}
_CONSTANTS = ("true", "false", "null")  # JSON's, as models write them too
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")  # JSON's
_HALF = re.compile("[\ud800-\udfff]")


def closing(text: str, at: int) -> int | None:
    """The end of what is in brackets from `at` on; None: it is not all there."""
    depth = 0
    while (found := _BRACKETS.search(text, at)) is not None:
        at = found.end()
        if (string := _STRINGS.get(found[0])) is not None:
            if (said := string.match(text, found.start())) is None:
                return None
            at = said.end()
            continue
        depth += 1 if found[0] in "([{" else -1
        if depth == 0:
            return at
    return None


def keywords(brackets: str) -> str | None:
    """The arguments of a call, from its opening to its closing bracket, as JSON; None: there are others than literals
    with names.
    """
    try:
        call = ast.parse(f"f{brackets}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(each.arg is None for each in call.keywords):
            return None
        lines = f"f{brackets}".replace("\r\n", "\n").replace("\r", "\n").encode().split(b"\n")
        return _object((each.arg, _literal(each.value, lines)) for each in call.keywords)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return None


def _literal(node: ast.expr, lines: Sequence[bytes]) -> str:
    """The JSON of a value; a number is as it stands there, however many digits it has."""
    match node:
        case ast.Name(id=name) if name in _CONSTANTS:
            return name
        case ast.List(elts=members) | ast.Tuple(elts=members):
            return f"[{', '.join(_literal(each, lines) for each in members)}]"
        case ast.Dict(keys=keys, values=values) if all(isinstance(key, ast.Constant) for key in keys):
            pairs = zip(keys, values, strict=True)
            return _object((ast.literal_eval(key), _literal(value, lines)) for key, value in pairs if key)
    value = ast.literal_eval(node)
    if isinstance(value, str):
        return _text(value)
    written = lines[node.lineno - 1][node.col_offset : node.end_col_offset].decode()
    if isinstance(value, int | float) and node.lineno == node.end_lineno and _NUMBER.fullmatch(written):
        return written
    if isinstance(value, bool | int | float | None):
        return json.dumps(value, allow_nan=False)
    raise TypeError(f"{value!r} is no JSON")


def _object(members: Iterable[tuple[object, str]]) -> str:
    """The JSON of an object; of members with the same name the last one counts."""
    found = {str(name): value for name, value in members}
    return f"{{{', '.join(f'{_text(name)}: {value}' for name, value in found.items())}}}"


def _text(value: str) -> str:
    """The JSON of a text, in which two halves of a character, each escaped by itself, are that character."""
    written = json.dumps(value, ensure_ascii=False)
    return json.dumps(value) if _HALF.search(written) else written
