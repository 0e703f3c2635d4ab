"""The arguments of `LLM` as flags."""

import argparse
import inspect
import types
from typing import Any, get_args, get_type_hints

from penstock.llm import LLM

_PLAIN = (int, float, str)


def add_engine(parser: argparse.ArgumentParser) -> None:
    """A flag for each argument of `LLM` that is a text, a number or a switch."""
    group = parser.add_argument_group("engine", "as `LLM` takes them")
    group.add_argument("--model", required=True, metavar="DIR", help="directory in the Hugging Face layout, or hub id")
    for name, parameter, kind in _arguments():
        flag = f"--{name.replace('_', '-')}"
        if kind is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=f"[{parameter.default}]")
        else:
            group.add_argument(
                flag, type=kind, default=None, metavar=kind.__name__.upper(), help=f"[{parameter.default}]"
            )


def make_engine(arguments: argparse.Namespace) -> LLM:
    """The engine that the flags ask for.

    Raises:
        PenstockError: as `LLM` does.
    """
    given = {name: value for name, _, _ in _arguments() if (value := getattr(arguments, name)) is not None}
    return LLM(arguments.model, **given)


def _arguments() -> list[tuple[str, inspect.Parameter, type]]:
    hints = get_type_hints(LLM.__init__)
    found = []
    for name, parameter in inspect.signature(LLM.__init__).parameters.items():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and name not in ("seed", "trust_remote_code"):
            found.append((name, parameter, _kind(hints[name])))
    return found


def _kind(hint: Any) -> type:
    """The type of a flag's value."""
    if isinstance(hint, types.UnionType):
        hint = next(each for each in get_args(hint) if each is not type(None))
    return bool if hint is bool else hint if hint in _PLAIN else str
