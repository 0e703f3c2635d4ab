"""The form that an output must have becomes a grammar over the model's tokens, in llguidance's form."""

import json
from typing import Any

from llguidance import LLMatcher, StructTag, grammar_from, regex_to_lark

from contract.domain.errors import PenstockError, invalid, unimplemented
from contract.domain.structured_outputs import StructuredOutputsParams
from tokenizer_svc.core.vocabulary import Vocabulary

# White space between JSON's tokens has an end, or a model that likes it would write nothing else until its last token.
_WHITE_SPACE = r"[ \t\n\r]{0,16}"
_ANY_OBJECT = '{"type": "object"}'
_ASCII = "dws"
_MOST_MESSAGE = 400  # characters of an error


class GrammarCompiler:
    """Makes grammars of forms, and finds out whether the model's tokens can follow them. Safe to call from several
    threads.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def compile(self, form: StructuredOutputsParams | None) -> str:
        """The grammar of a form; empty: any output will do.

        Raises:
            PenstockError: INVALID_ARGUMENT naming the form: it is none, or says what is not done.
        """
        if form is None:
            return ""
        if self._vocabulary.grammar_tokens is None:
            raise unimplemented(_PARAM)
        if not self._vocabulary.eos_token_ids:
            raise invalid("structured_outputs needs a model that has an end token, and this one has none", _PARAM)
        name, grammar = _grammar(form)
        is_wrong, messages = LLMatcher.validate_grammar_with_warnings(grammar, self._vocabulary.grammar_tokens())
        if is_wrong:
            raise _wrong(name, messages[0])
        return grammar


_PARAM = "structured_outputs"


def _grammar(form: StructuredOutputsParams) -> tuple[str, str]:
    """The field that says the form, and its grammar; not checked."""
    if form.json is not None or form.json_object:
        name = "json" if form.json is not None else "json_object"
        return name, _json_grammar(name, str(form.json) if form.json is not None else _ANY_OBJECT, form)
    if form.regex is not None:
        # Digits, words and white space are ASCII's, as in JSON schemas.
        return "regex", LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(form.regex, _ASCII)}/")
    if form.choice is not None:
        return "choice", grammar_from("choice", json.dumps(list(form.choice)))
    if form.grammar is not None:
        try:
            return "grammar", LLMatcher.grammar_from_lark(grammar_from("grammar", form.grammar))
        except Exception as error:  # whatever its parser of GBNF raises
            raise _wrong("grammar", error) from error
    return "structural_tag", _tags_grammar(json.loads(form.structural_tag or "{}"))


def _json_grammar(name: str, schema: str, form: StructuredOutputsParams) -> str:
    flexible = not form.disable_any_whitespace
    pattern = form.whitespace_pattern if form.whitespace_pattern is not None else _WHITE_SPACE
    options: dict[str, Any] = {"whitespace_flexible": flexible} | ({"whitespace_pattern": pattern} if flexible else {})
    try:
        return LLMatcher.grammar_from_json_schema(schema, defaults=options)  # type: ignore[arg-type]
    except ValueError as error:
        raise _wrong(name, error) from error


def _tags_grammar(tag: dict[str, Any]) -> str:
    """Text in which, after a trigger, one of the beginnings stands, what its schema says, and its end."""
    structures, triggers = tag.get("structures"), tag.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list) or not structures or not triggers:
        raise _wrong("structural_tag", "it must have `structures` and `triggers`, lists that are not empty")
    tags = []
    for each in structures:
        if not isinstance(each, dict) or not all(isinstance(each.get(key), str) for key in ("begin", "end")):
            raise _wrong("structural_tag", "each of `structures` must have a `begin` and an `end`, both texts")
        found = [one for one in triggers if isinstance(one, str) and one and each["begin"].startswith(one)]
        if not found:
            raise _wrong("structural_tag", f"no trigger is the beginning of {each['begin']!r:.80}")
        schema = each.get("schema", {})
        if not isinstance(schema, dict):
            raise _wrong("structural_tag", f"the schema of {each['begin']!r:.80} must be an object")
        tags.append(StructTag(trigger=max(found, key=len), begin=each["begin"], grammar=schema, end=each["end"]))
    return LLMatcher.grammar_from_lark(StructTag.to_grammar(tags, assume_special=False))


def _wrong(name: str, error: object) -> PenstockError:
    return invalid(f"{_PARAM}.{name}: {' '.join(str(error).split())[:_MOST_MESSAGE]}", _PARAM)
