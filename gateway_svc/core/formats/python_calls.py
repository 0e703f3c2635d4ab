"""Calls in Python whose arguments are literals with names."""

import ast
import json
import re
from typing import Any

_BRACKETS = re.compile(r"[()\[\]{}'\"]")
_STRINGS = {quote: re.compile(rf"{quote}(?:[^{quote}\\]|\\.)*{quote}", re.DOTALL) for quote in "'\""}
_CONSTANTS = {"true": True, "false": False, "null": None}  # JSON's, as models write them too


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
        values = {str(each.arg): _literal(each.value) for each in call.keywords}
        return json.dumps(values, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return None


def _literal(node: ast.expr) -> Any:
    match node:
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.List(elts=members) | ast.Tuple(elts=members):
            return [_literal(each) for each in members]
        case ast.Dict(keys=keys, values=values) if all(isinstance(key, ast.Constant) for key in keys):
            return {str(ast.literal_eval(key)): _literal(value) for key, value in zip(keys, values, strict=True) if key}
    value = ast.literal_eval(node)
    if not isinstance(value, str | int | float | bool | None):
        raise TypeError(f"{value!r} is no JSON")
    return value
