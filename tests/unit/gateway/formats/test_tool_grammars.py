"""Outputs that follow the grammars of tool choices: drawn at random, they are read as calls that fit their schemas."""

import json
import random
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from outputs import Told, read, thoughts_of
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from bench.rig.schemas import random_schema
from contract.domain.chat_facts import ChatFacts, Mark
from contract.domain.errors import PenstockError
from contract.domain.structured_outputs import StructuredOutputsParams
from gateway_svc.core.formats.choice import ModelFormats
from gateway_svc.core.formats.output_format import OutputFormat
from gateway_svc.core.formats.registry import TOOL_FORMATS
from gateway_svc.core.grammars.keyed import plain_texts
from gateway_svc.core.tool_grammars import output_grammar
from gateway_svc.core.tools import Function, ToolUse
from tokenizer_svc.core.grammars import grammar_of

WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
FUNCTIONS = (Function("weather", WEATHER, False), Function("nothing", {}, False))
NOT_DONE = ("uniqueItems", "not", "patternProperties", "propertyNames", "minProperties", "if")
STRICT = (Function("weather", WEATHER, True),)
MARKED = ("hermes", "mistral", "deepseek")
FORMATS = sorted(TOOL_FORMATS)
KINDS = ("letters", "plain", "special")  # of marks: none are tokens, or all, which are special tokens or are not


class WrongGrammarError(Exception):
    """The tokenizer refuses such a grammar."""


@lru_cache
def vocabulary(name: str, kind: str) -> tuple[Tokenizer, LLTokenizer, dict[str, Mark]]:
    """A token for each byte and each mark of a format."""
    every = () if kind == "letters" else dict.fromkeys((*TOOL_FORMATS[name].marks, *thoughts_of(name).marks))
    marks = [each for each in every if len(each) > 1]
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|eos|>", special=True)])
    tokenizer.add_tokens([AddedToken(each, special=kind == "special", normalized=False) for each in marks])
    end = tokenizer.token_to_id("<|eos|>")
    tokens = LLTokenizer(tokenizer.to_str(), n_vocab=tokenizer.get_vocab_size(), eos_token=end)
    return tokenizer, tokens, {each: Mark(tokenizer.token_to_id(each), kind == "special") for each in marks}


def written(
    grammar: str, tokenizer: Tokenizer, tokens: LLTokenizer, rng: random.Random, most: int = 3000
) -> str | None:
    """A text drawn token by token, in which what ends things comes rather often; None: it came to no end."""
    error, messages = LLMatcher.validate_grammar_with_warnings(grammar, tokens)
    if error:
        raise WrongGrammarError(messages)
    matcher = LLMatcher(tokens, grammar, log_level=0)
    mask, ids = allocate_token_bitmask(1, tokens.vocab_size), list[int]()
    while len(ids) < most and not matcher.is_stopped():
        fill_next_token_bitmask(matcher, mask)
        allowed = np.flatnonzero(np.unpackbits(mask[0].view(np.uint8), bitorder="little")[: tokens.vocab_size])
        assert len(allowed), matcher.get_error()
        likely = [each for each in allowed.tolist() if each >= 256 or chr(each) in '<>[]{}",:;|/tool_call']
        token = int(rng.choice(likely if likely and rng.random() < 0.8 else allowed.tolist()))
        assert matcher.consume_token(token)
        if token == tokens.eos_token:
            break
        ids.append(token)
    assert not matcher.is_error(), matcher.get_error()
    text: str = tokenizer.decode(ids, skip_special_tokens=False)
    return text if len(ids) < most else None


def outputs(
    name: str,
    use: ToolUse | None,
    *,
    kind: str = "special",
    is_thinking: bool = False,
    thinks: bool = False,
    answer: StructuredOutputsParams | None = None,
    num: int = 12,
) -> Iterator[tuple[str, Told]]:
    """Whole outputs, and what is read in them."""
    tokenizer, tokens, known = vocabulary(name, kind)
    formats = ModelFormats(TOOL_FORMATS[name], thoughts_of(name) if thinks else None, ChatFacts(marks=known))
    grammar = grammar_of(output_grammar(use, formats, is_thinking=is_thinking, answer=answer))
    bound = [each for each in (use.functions if use else ()) if use and use.is_bound(each)]
    texts = {each.name: frozenset(plain_texts(each)) for each in bound}
    form = OutputFormat(TOOL_FORMATS[name], formats.reasoning, is_reasoning=is_thinking, texts=texts)
    for seed in range(num):
        text = written(grammar, tokenizer, tokens, random.Random(seed))
        if text is not None:
            yield text, read(form, [text])


def check(calls: list[tuple[str, str]]) -> None:
    for name, arguments in calls:
        found = json.loads(arguments)
        assert isinstance(found, dict)
        if name == "weather":
            assert found.keys() == {"city", "days"}
            assert found["city"] in ("Oslo", "Rome")
            assert 1 <= found["days"] <= 9


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FORMATS)
def test_a_call_that_is_required_comes(name: str, kind: str) -> None:
    several = set()
    for _, told in outputs(name, ToolUse(FUNCTIONS[:1], must_call=True), kind=kind):
        assert told.content == ""
        several.add(len(told.calls))
        check(told.calls)
    assert 0 not in several
    assert len(several) > 1 or name in ("glm", "harmony")  # a line break between them comes rarely; there is one


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FORMATS)
def test_a_single_call_stays_alone(name: str, kind: str) -> None:
    for use in (ToolUse(FUNCTIONS[:1], must_call=True, is_single=True), ToolUse(STRICT, is_single=True)):
        counts = set()
        for _, told in outputs(name, use, kind=kind):
            counts.add(len(told.calls))
            check(told.calls)
        assert counts <= ({1} if use.must_call else {0, 1})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("is_thinking", [True, False])
def test_thoughts_may_come_first(name: str, kind: str, is_thinking: bool) -> None:
    use, form, thoughts = ToolUse(FUNCTIONS[:1], must_call=True, is_single=True), thoughts_of(name), list[bool]()
    for text, told in outputs(name, use, kind=kind, is_thinking=is_thinking, thinks=True):
        thoughts.append(form.closes in text)
        if form.closes in text or not (is_thinking or form.opens in text):
            assert len(told.calls) == 1, text
            assert told.content == ""
        check(told.calls)
    assert any(thoughts) or kind == "letters"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FORMATS)
def test_what_is_strict_is_right_wherever_it_comes(name: str, kind: str) -> None:
    found = [told for _, told in outputs(name, ToolUse(STRICT), kind=kind)]
    for told in found:
        check(told.calls)
        assert all(mark not in told.content for mark in TOOL_FORMATS[name].opens)
    if kind != "letters" and name in MARKED:
        assert any(told.calls for told in found)


@pytest.mark.parametrize("use", [None, ToolUse(FUNCTIONS[:1])])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("thinks", [True, False])
def test_an_answer_has_its_form_unless_functions_are_called(name: str, use: ToolUse | None, thinks: bool) -> None:
    flag = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    answer = StructuredOutputsParams(json={**flag, "additionalProperties": False})
    num_answers = 0
    for text, told in outputs(name, use, kind="special", thinks=thinks, answer=answer):
        if told.content:
            assert json.loads(told.content)["ok"] in (True, False)
            num_answers += 1
        elif thoughts_of(name).closes in text or thoughts_of(name).opens not in text:
            assert told.calls
            assert use is not None
    assert num_answers


@pytest.mark.parametrize("name", FORMATS)
def test_arguments_that_are_read_are_right_by_any_schema(name: str) -> None:
    num_read = 0
    for seed in range(60):
        schema = random_schema(random.Random(seed))
        use = ToolUse((Function("weather", schema, True),), must_call=True, is_single=True)
        validator = jsonschema_rs.validator_for({**schema, "$schema": "https://json-schema.org/draft/2020-12/schema"})
        try:
            told = [each for _, each in outputs(name, use, kind=KINDS[seed % 3], num=3)]
        except (PenstockError, WrongGrammarError):
            assert any(f'"{keyword}"' in json.dumps(schema) for keyword in NOT_DONE)
            continue
        for each in told:
            ((function, arguments),) = each.calls
            assert (function, each.content) == ("weather", "")
            validator.validate(json.loads(arguments))
            num_read += 1
    assert num_read > 60


def bound(name: str, **schema: Any) -> str:
    """The grammar of a function that must be called with such arguments."""
    use = ToolUse((Function("f", schema, True),), must_call=True)
    return str(output_grammar(use, ModelFormats(TOOL_FORMATS[name]), is_thinking=False).grammar)


@pytest.mark.parametrize("name", ["glm", "pythonic"])
@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"anyOf": []}, "'anyOf'"),
        ({"minProperties": 1}, "'minProperties'"),
        ({"type": "array"}, "'array'"),
        ({"properties": {"a": {"items": {"$ref": "#"}}}}, "'#'"),
        ({"required": ["a"], "additionalProperties": False}, "'a'"),
        ({"properties": {"a": False}, "required": ["a"]}, "'a'"),
        ({"properties": {"a": 1}}, "no object"),
        ({"properties": []}, "no object"),
    ],
)
def test_what_cannot_be_held_to_is_refused_by_name(name: str, schema: dict[str, Any], said: str) -> None:
    with pytest.raises(PenstockError, match=said) as refused:
        bound(name, **schema)
    assert refused.value.param == "tools"


def test_keys_and_texts_that_a_format_has_no_words_for_are_refused() -> None:
    for name, properties in (
        ("pythonic", {"a-b": {}}),
        ("pythonic", {"class": {}}),
        ("glm", {"a</arg_key>": {}}),
        ("glm", {"a": {"enum": ["</arg_value>"]}}),
    ):
        with pytest.raises(PenstockError, match="cannot be held to") as refused:
            bound(name, properties=properties)
        assert refused.value.param == "tools"


def test_python_has_words_of_its_own() -> None:
    tokenizer, tokens, _ = vocabulary("pythonic", "letters")
    kinds = {"a": {"type": "boolean"}, "b": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "c": {"enum": ["x"]}}
    grammar = grammar_of(StructuredOutputsParams(grammar=bound("pythonic", properties=kinds)))
    for text, is_right in (
        ("[f(a=True, b='it\\'s', c='x')]", True),
        ("[f(b=None)]", True),
        ("[f()]", True),
        ("[f(z=1, z=2)]", True),
        ("[f(a=true)]", False),
        ("[f(b=1)]", False),
        ("[f(c=None)]", False),
        ("[f(c='x', a=True)]", False),
        ("[f(c='x', lambda=1)]", False),
    ):
        matcher = LLMatcher(tokens, grammar, log_level=0)
        ids = tokenizer.encode(text).ids
        assert (matcher.validate_tokens(ids) == len(ids)) is is_right, text


def test_schemas_have_a_bound() -> None:
    many = ToolUse((Function("f", {"description": "x" * 70_000}, True),), must_call=True)
    with pytest.raises(PenstockError, match="64 KiB") as refused:
        output_grammar(many, ModelFormats(TOOL_FORMATS["hermes"]), is_thinking=False)
    assert refused.value.param == "tools"
