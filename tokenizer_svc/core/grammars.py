"""The form that an output must have becomes a grammar over the model's tokens, in llguidance's form."""

import json
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher, StructTag, grammar_from, regex_to_lark

from contract.domain.errors import PenstockError, invalid, unimplemented
from contract.domain.structured_outputs import StructuredOutputsParams, spaced_schema
from tokenizer_svc.core.structural_tags.reading import read_structural_tag
from tokenizer_svc.core.structural_tags.rules import rules_of
from tokenizer_svc.core.vocabulary import Vocabulary

# All tokens that can go on may come, and not the longest alone where a text has no choice: a model goes on with the
# tokens that it knows from its training, and tokenizers that change a text cannot mislead the library.
_OPTIONS, _NO_OPTIONS = '%llguidance {"no_forcing": true}\n', "%llguidance {}\n"
_ASCII = "dws"
_MOST_MESSAGE = 400  # characters of an error
_REMEMBERED = 64  # grammars, of up to 64 KiB each


class GrammarCompiler:
    """Makes grammars of forms, and finds out whether the model's tokens can follow them. Safe to call from several
    threads.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._mistake = lru_cache(_REMEMBERED)(self._find_mistake)  # many requests have the same form

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
        grammar = grammar_of(form)
        if (mistake := self._mistake(grammar)) is not None:
            raise _wrong(form.said, mistake)
        return grammar

    def _find_mistake(self, grammar: str) -> str | None:
        assert self._vocabulary.grammar_tokens is not None
        is_wrong, messages = LLMatcher.validate_grammar_with_warnings(grammar, self._vocabulary.grammar_tokens())
        return str(messages[0]) if is_wrong else None


_PARAM = "structured_outputs"


def grammar_of(form: StructuredOutputsParams) -> str:
    """The grammar of a form, in Lark's syntax; the vocabulary has not seen it yet.

    Raises:
        PenstockError: INVALID_ARGUMENT naming the form: it is none.
    """
    return _OPTIONS + _rules(form).replace(_NO_OPTIONS, "")


def _rules(form: StructuredOutputsParams) -> str:
    match form.said:
        case "regex":
            # Digits, words and white space are ASCII's, as in JSON schemas.
            return f"start: /{regex_to_lark(str(form.regex), _ASCII)}/"
        case "choice":
            return grammar_from("choice", json.dumps(list(form.choice or ())))
        case "grammar":
            return _given(str(form.grammar))
        case "structural_tag":
            tag = json.loads(str(form.structural_tag))
            return rules_of(read_structural_tag(tag)) if "format" in tag else _tags_grammar(tag)
        case _:
            return f"start: %json {json.dumps(spaced_schema(form))}"


def _given(text: str) -> str:
    """A caller's grammar, in Lark's syntax or in GBNF's."""
    if "%llguidance" in text:
        raise _wrong("grammar", "%llguidance is not taken: how a grammar is followed is decided here")
    try:
        return grammar_from("grammar", text)
    except Exception as error:  # whatever its parser of GBNF raises
        raise _wrong("grammar", error) from error


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
    return StructTag.to_grammar(tags, assume_special=False)


def _wrong(name: str, error: object) -> PenstockError:
    return invalid(f"{_PARAM}.{name}: {' '.join(str(error).split())[:_MOST_MESSAGE]}", _PARAM)
