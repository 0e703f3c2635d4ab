"""Outputs that follow the grammars of tool choices: drawn at random, they are read as calls that fit their schemas."""

import json
import random
from collections.abc import Iterator

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from outputs import Told, read
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from contract.domain.chat_facts import ChatFacts, Mark
from contract.domain.errors import PenstockError
from contract.domain.structured_outputs import StructuredOutputsParams
from gateway_svc.core.formats.choice import ModelFormats
from gateway_svc.core.formats.reader import OutputFormat
from gateway_svc.core.formats.registry import TOOL_FORMATS
from gateway_svc.core.formats.think import THINK
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
STRICT = (Function("weather", WEATHER, True),)
MARKED = ("hermes", "mistral", "deepseek")
FORMATS = (*MARKED, "llama3_json")


def vocabulary(marks: tuple[str, ...]) -> tuple[Tokenizer, LLTokenizer, dict[str, Mark]]:
    """A token for each byte and each mark."""
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in ("<|end|>", *marks)])
    end = tokenizer.token_to_id("<|end|>")
    tokens = LLTokenizer(tokenizer.to_str(), n_vocab=tokenizer.get_vocab_size(), eos_token=end)
    return tokenizer, tokens, {each: Mark(tokenizer.token_to_id(each), True) for each in marks}


def written(grammar: str, tokenizer: Tokenizer, tokens: LLTokenizer, rng: random.Random, most: int = 3000) -> str:
    """A text drawn token by token; marks and what ends things come rather often."""
    error, messages = LLMatcher.validate_grammar_with_warnings(grammar, tokens)
    assert not error, messages
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
    return text


def outputs(
    name: str,
    use: ToolUse | None,
    *,
    has_tokens: bool,
    is_thinking: bool = False,
    thinks: bool = False,
    answer: StructuredOutputsParams | None = None,
) -> Iterator[tuple[str, Told]]:
    marks = (*TOOL_FORMATS[name].marks, THINK.opens, THINK.closes) if has_tokens else ()
    tokenizer, tokens, known = vocabulary(tuple(dict.fromkeys(filter(None, marks))))
    reasoning = THINK if thinks else None
    formats = ModelFormats(TOOL_FORMATS[name], reasoning, ChatFacts(marks=known))
    grammar = grammar_of(output_grammar(use, formats, is_thinking=is_thinking, answer=answer))
    for seed in range(12):
        text = written(grammar, tokenizer, tokens, random.Random(seed))
        yield text, read(OutputFormat(TOOL_FORMATS[name], reasoning, is_reasoning=is_thinking), [text])


def check(calls: list[tuple[str, str]]) -> None:
    for name, arguments in calls:
        found = json.loads(arguments)
        assert isinstance(found, dict)
        if name == "weather":
            assert found.keys() == {"city", "days"}
            assert found["city"] in ("Oslo", "Rome")
            assert 1 <= found["days"] <= 9


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_a_call_that_is_required_comes(name: str, has_tokens: bool) -> None:
    several = set()
    for _, told in outputs(name, ToolUse(FUNCTIONS[:1], must_call=True), has_tokens=has_tokens):
        assert told.content == ""
        several.add(len(told.calls))
        check(told.calls)
    assert 0 not in several
    assert len(several) > 1


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_a_single_call_stays_alone(name: str, has_tokens: bool) -> None:
    for use in (ToolUse(FUNCTIONS[:1], must_call=True, is_single=True), ToolUse(STRICT, is_single=True)):
        counts = set()
        for _, told in outputs(name, use, has_tokens=has_tokens):
            counts.add(len(told.calls))
            check(told.calls)
        assert counts <= ({1} if use.must_call else {0, 1})


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("is_thinking", [True, False])
def test_thoughts_may_come_first(name: str, has_tokens: bool, is_thinking: bool) -> None:
    use, thoughts = ToolUse(FUNCTIONS[:1], must_call=True, is_single=True), list[bool]()
    for text, told in outputs(name, use, has_tokens=has_tokens, is_thinking=is_thinking, thinks=True):
        thoughts.append("</think>" in text)
        if THINK.closes in text or not (is_thinking or THINK.opens in text):
            assert len(told.calls) == 1, text
            assert told.content == ""
        check(told.calls)
    assert any(thoughts) or not has_tokens


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_what_is_strict_is_right_wherever_it_comes(name: str, has_tokens: bool) -> None:
    found = [told for _, told in outputs(name, ToolUse(STRICT), has_tokens=has_tokens)]
    for told in found:
        check(told.calls)
        assert all(mark not in told.content for mark in TOOL_FORMATS[name].opens)
    if has_tokens and name in MARKED:
        assert any(told.calls for told in found)


@pytest.mark.parametrize("use", [None, ToolUse(FUNCTIONS[:1])])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("thinks", [True, False])
def test_an_answer_has_its_form_unless_functions_are_called(name: str, use: ToolUse | None, thinks: bool) -> None:
    flag = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    answer = StructuredOutputsParams(json={**flag, "additionalProperties": False})
    num_answers = 0
    for text, told in outputs(name, use, has_tokens=True, thinks=thinks, answer=answer):
        if told.content:
            assert json.loads(told.content)["ok"] in (True, False)
            num_answers += 1
        elif THINK.closes in text or THINK.opens not in text:
            assert told.calls
            assert use is not None
    assert num_answers


@pytest.mark.parametrize("name", ["pythonic", "glm"])
def test_a_format_without_a_grammar_is_refused(name: str) -> None:
    for use, param in (
        (ToolUse(FUNCTIONS, must_call=True), "tool_choice"),
        (ToolUse(STRICT), "tools"),
        (ToolUse(FUNCTIONS, is_single=True), "parallel_tool_calls"),
    ):
        with pytest.raises(PenstockError, match=name) as refused:
            output_grammar(use, ModelFormats(TOOL_FORMATS[name]), is_thinking=False)
        assert refused.value.param == param


def test_schemas_have_a_bound() -> None:
    many = ToolUse((Function("f", {"description": "x" * 70_000}, True),), must_call=True)
    with pytest.raises(PenstockError, match="64 KiB") as refused:
        output_grammar(many, ModelFormats(TOOL_FORMATS["hermes"]), is_thinking=False)
    assert refused.value.param == "tools"
