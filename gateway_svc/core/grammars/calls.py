"""Rules of calls of functions as a model writes them."""

from collections.abc import Iterable

from gateway_svc.core.formats.written import Arguments, Written
from gateway_svc.core.grammars.keyed import keyed_arguments
from gateway_svc.core.grammars.parameters import any_parameters, parameters_of
from gateway_svc.core.grammars.python import python_arguments
from gateway_svc.core.grammars.terms import Speller, json_value, options, terms
from gateway_svc.core.tools import Function, ToolUse


def call_rules(index: int, way: Written, use: ToolUse, speller: Speller) -> Iterable[str]:
    """The rules of one call of one of the functions, the first of which is `call_{index}`.

    Raises:
        PenstockError: INVALID_ARGUMENT: a schema asks for what cannot be said so.
    """
    yield f"call_{index}: {options(f'call_{index}', len(use.functions))}"
    for number, each in enumerate(use.functions):
        name, is_bound = f"call_{index}_{number}", use.is_bound(each)
        arguments, rules = _arguments(f"{name}_arguments", way.arguments, each, speller, is_bound=is_bound)
        begin, end = speller.spell(f"{way.begin}{each.name}{way.middle}"), speller.spell(way.end)
        yield f"{name}: {terms(begin, arguments, end)}"
        yield from rules


def _arguments(
    name: str, written: Arguments, function: Function, speller: Speller, *, is_bound: bool
) -> tuple[str, Iterable[str]]:
    """The term of a function's arguments, as its schema says if they are bound to it, and the rules that it needs."""
    if written is Arguments.JSON:
        return json_value({"type": "object"} | dict(function.parameters if is_bound else {})), ()
    parameters = parameters_of(function) if is_bound else any_parameters()
    if written is Arguments.KEYED:
        return name, keyed_arguments(name, function, parameters, speller)
    return name, python_arguments(name, function, parameters)
