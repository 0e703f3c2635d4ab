"""Arguments as keys and values, each between marks of their own: texts as they are, other values as JSON."""

from collections.abc import Iterable, Sequence

from gateway_svc.core.formats.table import KeyedCall
from gateway_svc.core.grammars.parameters import NOTES, Parameter, Parameters, unsayable
from gateway_svc.core.grammars.terms import Speller, json_value, literal, one_of, terms
from gateway_svc.core.tools import Function

_CALL = KeyedCall()
_BREAK = r"/\n?/"  # GLM 4.5 and 4.6 have one between the parts, their successors none
_KEY = "/[^<]{1,256}/"
_PLAIN = NOTES | {"type", "enum"}


def plain_texts(function: Function) -> tuple[str, ...]:
    """The parameters that are texts and are written as they are; texts of which the schema says more are JSON."""
    properties = function.parameters.get("properties", {})
    return tuple(name for name in function.texts if _PLAIN.issuperset(properties[name]))


def keyed_arguments(name: str, function: Function, parameters: Parameters, speller: Speller) -> Iterable[str]:
    """The rules of a function's arguments, the first of which has this name.

    Raises:
        PenstockError: INVALID_ARGUMENT: a key or a value cannot be said between the marks.
    """
    texts, named = plain_texts(function), parameters.named
    pairs = [f"{name}_{index}{'' if each.is_required else '?'}" for index, each in enumerate(named)]
    others = [] if parameters.others is None else [f"{name}_other*"]
    yield f"{name}: {terms(_BREAK, *pairs, *others)}"
    for index, each in enumerate(named):
        _check_key(function, each.name)
        value, rules = _value(f"{name}_{index}", function, each, speller, is_text=each.name in texts)
        yield from (f"{name}_{index}: {_pair(literal(each.name), value, speller)}", *rules)
    if parameters.others is not None:
        key, other = f"{name}_key".upper(), Parameter("", parameters.others, is_required=False)
        yield f"{key}: {_KEY}" + (f" & ~{one_of(each.name for each in named)}" if named else "")
        value, rules = _value(f"{name}_other", function, other, speller, is_text=False)
        yield from (f"{name}_other: {_pair(key, value, speller)}", *rules)


def _pair(key: str, value: str, speller: Speller) -> str:
    """The terms of a key and of a value with the mark that closes it."""
    opens, closes, opens_value = map(speller.spell, (*_CALL.key, _CALL.value[0]))
    return terms(opens, key, closes, _BREAK, opens_value, value, _BREAK)


def _value(
    name: str, function: Function, parameter: Parameter, speller: Speller, *, is_text: bool
) -> tuple[str, Sequence[str]]:
    """The terms of a value with the mark that closes it, and the rules that they need."""
    schema, closes = parameter.schema, _CALL.value[1]
    if is_text and "enum" in schema:
        return f"({' | '.join(_members(function, schema['enum']))}) {speller.spell(closes)}", ()
    if is_text or NOTES.issuperset(schema):
        term, rule = speller.up_to(f"{name}_text", closes)
        return term, (rule,)
    return f"{json_value(schema)} {speller.spell(closes)}", ()


def _members(function: Function, texts: Iterable[str]) -> Iterable[str]:
    for each in texts:
        if _CALL.value[1] in each:
            raise unsayable(function, f"the text {each!r:.66}")
        yield literal(each)


def _check_key(function: Function, key: str) -> None:
    if not key or _CALL.key[1] in key:
        raise unsayable(function, f"a parameter {key!r:.66}")
