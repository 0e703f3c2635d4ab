"""Structural tags with a `format`: the texts that their grammars let through, by the library that follows them."""

import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from byte_tokenizer import write_byte_model
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from contract.domain.errors import ErrorCode, PenstockError
from contract.domain.structured_outputs import StructuredOutputsParams
from tokenizer_svc.core.grammars import GrammarCompiler
from tokenizer_svc.core.vocabulary import Vocabulary
from tokenizer_svc.loading import load_vocabulary

NUMBERS = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
ANY = {"type": "any_text"}
JSON = {"type": "json_schema", "json_schema": NUMBERS}


def const(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


def tag(begin: str, content: dict[str, Any], end: str | list[str]) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def sequence(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "elements": elements}


def either(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": "or", "elements": elements}


def triggered(*tags: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "triggered_tags", "triggers": ["<f="], "tags": tags, **more}


def separated(*tags: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "tags_with_separator", "tags": tags, "separator": ", ", **more}


FOX, OWL = tag("<f=fox>", JSON, "</f>"), tag("<f=owl>", const("hu"), "</f>")
F, O = '<f=fox>{"n": 1}</f>', "<f=owl>hu</f>"  # noqa: E741
THINK = tag("<think>", ANY, "</think>")
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "mood": {"enum": ["good", 'so "so"']},
        "home": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
    },
    "required": ["name", "age"],
}
QWEN = {"type": "qwen_xml_parameter", "json_schema": PERSON}
NAME, AGE = "<parameter=name>\nBo <b>\n</parameter>", "<parameter=age>\n7\n</parameter>"
HOME = '<parameter=home>{"town": "</parameter>"}</parameter>'

CASES: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "const": (const('a "b"\n/c\\'), ['a "b"\n/c\\'], ["", "a", 'a "b"\n/c\\ ']),
    "any": (ANY, ["", "x\n</f>"], []),
    "any but": (ANY | {"excludes": ["fox", "o\nw"]}, ["", "fo x", "o w"], ["a fox", "o\nw"]),
    "json": (JSON, ['{"n": 12}', '{\n  "n": 12\n}'], ["{}", '{"n": "a"}', '{"n": 1}x']),
    "any json": ({"type": "json_schema", "json_schema": True}, ["1", "[{}]", '"a"'], ["a"]),
    "regex": ({"type": "regex", "pattern": r"[ab]+\d"}, ["a1", "bbb7"], ["a", "1", "a1x"]),
    "regex in a tag": (tag("<", {"type": "regex", "pattern": ".+"}, ">!"), ["<a>!", "<a\">!"],
                       ["<>!", "<a>", "<a\n>!"]),
    "lark": ({"type": "grammar", "grammar": 'start: fox+\nfox: "f{ox" | /[0-9]}/'}, ["f{ox1}", "2}"], ["", "fox"]),
    "gbnf": (tag("(", {"type": "grammar", "grammar": 'root ::= "a" b\nb ::= "b" | "c"'}, ")"), ["(ab)", "(ac)"],
             ["ab"]),
    "sequence": (sequence(const("a"), JSON, const("b")), ['a{"n": 1}b'], ["ab", 'a{"n": 1}']),
    "or": (either(const("a"), const("ab"), JSON), ["a", "ab", '{"n": 1}'], ["", "b", "aab"]),
    "thoughts": (sequence(THINK, JSON), ['<think>hm</think>{"n": 1}', '<think></think>{"n": 1}'],
                 ['{"n": 1}', '<think>a</think>b{"n": 1}']),
    "several ends": (sequence(tag("<", ANY, [">", "|"]), const("!")), ["<a>!", "<b|!"], ["<a>b>!", "<a!"]),
    "text in one of several": (sequence(tag("<", either(JSON, ANY), ">"), const("!")),
                               ['<{"n": 1}>!', "<what>!", "<>!"], ["<a>b>!"]),
    "text before one of several": (sequence(ANY, either(const("yes"), const("no")), const(".")),
                                   ["well, yes.", "no."], ["yes", "yes no."]),
    "but in a tag": (sequence(tag("<", ANY | {"excluded_str": ["fox"]}, ">")), ["<owl>", "<fo>"], ["<a fox>"]),
    "triggered": (triggered(FOX, OWL), ["", "hello", F, O + F, f"so {F} and {O} bye"],
                  ["<f=", "<f=cat>", "<f=fox>{}</f>", f"a {F} b <f=fox>"]),
    "triggered once at least": (triggered(FOX, OWL, at_least_one=True), [F, O, f"{F} and {O} bye"],
                                ["", "hello", f" {F}"]),
    "triggered once": (triggered(FOX, OWL, stop_after_first=True), ["", "hello", f"so {F}", O], [f"so {F}.", O + O]),
    "triggered exactly once": (triggered(FOX, OWL, at_least_one=True, stop_after_first=True), [F, O],
                               ["", f"{F}.", f"so {O}"]),
    "triggered but": (triggered(OWL, excludes=["cat"]), ["a dog", f"a {O} dog"], ["a cat", f"a {O} cat", f"cat {O}"]),
    "triggered in a tag": (sequence(tag("[", triggered(FOX, OWL), "]"), const("!")),
                           ["[]!", f"[so {F}, {O}]!", "[hm]!"], [f"[{F}", "[<f=]!"]),
    "triggered once in a tag": (tag("[", triggered(OWL, stop_after_first=True), "]"), ["[]", "[hm]", f"[so {O}]"],
                                [f"[so {O} on]"]),
    "triggered after thoughts": (sequence(THINK, triggered(FOX)), [f"<think>{F[:4]}</think>so {F}"], [f"so {F}"]),
    "triggered after text": (sequence(ANY, triggered(OWL)), ["a", f"so {O}"], ["<f="]),
    "separated": (separated(FOX, OWL), ["", F, f"{F}, {O}, {O}"], [f"{F},{O}", f"{F}, ", "x"]),
    "separated, one at least": (separated(FOX, at_least_one=True), [F, f"{F}, {F}"], [""]),
    "separated, one at most": (separated(OWL, stop_after_first=True), ["", O], [f"{O}, {O}"]),
    "separated by nothing": (separated(OWL) | {"separator": ""}, ["", O + O], [f"{O}, {O}"]),
    "separated in a tag": (tag("[", separated(OWL), "]"), ["[]", f"[{O}, {O}]"], [f"[{O}, ]"]),
    "optional": (sequence({"type": "optional", "content": const("a")}, const("b")), ["b", "ab"], ["a", "aab"]),
    "star": (sequence({"type": "star", "content": const("a")}, const("b")), ["b", "aab"], ["a"]),
    "plus": ({"type": "plus", "content": either(const("a"), JSON)}, ["a", 'a{"n": 1}a'], [""]),
    "parameters": (QWEN, [NAME + AGE, f"{NAME}\n{AGE}", f"{NAME}{AGE}\n<parameter=mood>so \"so\"</parameter>",
                          f"{NAME}{AGE}{HOME}", f" \n{NAME}\t{AGE}"],
                   ["", NAME, AGE + NAME, f"{NAME}{AGE}<parameter=mood>bad</parameter>", f"{NAME}{AGE}{NAME}",
                    f"{NAME}<parameter=age>\"7\"</parameter>", f"{NAME},{AGE}"]),
    "parameters in a tag": (tag("<function=f>", QWEN, "\n</function>"),
                            [f"<function=f>\n{NAME}\n{AGE}\n{HOME}\n</function>",
                             f"<function=f>{NAME}{AGE}\n</function>"], [f"<function=f>{NAME}{AGE}</function>"]),
    "parameters by style": (JSON | {"style": "qwen_xml"}, ["<parameter=n>1</parameter>"], ['{"n": 1}']),
}  # fmt: skip


@lru_cache(1)
def vocabulary(directory: str) -> Vocabulary:
    write_byte_model(Path(directory))
    return load_vocabulary(directory)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    return vocabulary(str(tmp_path_factory.mktemp("bytes")))


@pytest.fixture(scope="module")
def accepts(words: Vocabulary) -> Callable[[dict[str, Any], str], bool]:
    """Return whether a whole text has a format."""
    compiler = GrammarCompiler(words)
    assert words.grammar_tokens is not None
    tokens = words.grammar_tokens()

    def has_format(format_: dict[str, Any], text: str) -> bool:
        form = StructuredOutputsParams(structural_tag=json.dumps({"type": "structural_tag", "format": format_}))
        matcher = LLMatcher(tokens, compiler.compile(form))
        token_ids = words.tokenizer.encode(text, add_special_tokens=False).ids
        assert not matcher.is_error()
        return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()

    return has_format


@pytest.mark.parametrize("name", CASES)
def test_texts_of_a_format_are_let_through_and_no_others(
    accepts: Callable[[dict[str, Any], str], bool], name: str
) -> None:
    format_, good, bad = CASES[name]
    assert [text for text in good if not accepts(format_, text)] == []
    assert [text for text in bad if accepts(format_, text)] == []


TEXTS = st.text(st.sampled_from("ab<>/\\\"'\n\t\r{}[]é☃\U0001f98a\x01 %&~|."), max_size=6)


@given(begin=TEXTS, end=TEXTS.filter(bool), inner=TEXTS, excluded=TEXTS.filter(bool))
@settings(max_examples=60)
def test_any_marks_end_any_text(
    accepts: Callable[[dict[str, Any], str], bool], begin: str, end: str, inner: str, excluded: str
) -> None:
    assume(end not in (inner + end)[:-1])
    whole = f"{begin}{inner}{end}!"
    assert accepts(sequence(tag(begin, ANY, end), const("!")), whole)
    assert not accepts(sequence(tag(begin, ANY, end), const("!")), f"{whole}{end}!")
    but = tag(begin, ANY | {"excludes": [excluded]}, end)
    assert accepts(sequence(but, const("!")), whole) == (excluded not in inner)


@given(before=TEXTS, value=TEXTS, after=TEXTS)
@settings(max_examples=60)
def test_any_text_stands_beside_tags(
    accepts: Callable[[dict[str, Any], str], bool], before: str, value: str, after: str
) -> None:
    one = tag("<f=a>", const(value), "</f>")
    whole = f"{before}<f=a>{value}</f>{after}"
    assume("<f=" not in before + after and "<f=" not in whole.replace("<f=a>", "", 1))
    assert accepts(triggered(one), whole)
    assert accepts(triggered(one, at_least_one=True), whole) == (not before)
    assert accepts(triggered(one, stop_after_first=True), whole) == (not after)


@pytest.mark.parametrize(
    ("format_", "told"),
    [
        ({}, "format: a format must be an object with a `type`"),
        ({"type": "token"}, "format: type 'token' is not done: there are const_string"),
        (sequence(const("a"), {"type": "any_tokens"}), "format.elements[1]: type 'any_tokens' is not done"),
        (const("a") | {"text": "b"}, "format: const_string has no field 'text'"),
        ({"type": "const_string"}, "format.value: it must be a text"),
        (JSON | {"style": "minimax_xml"}, "format.style: 'minimax_xml' is not done"),
        ({"type": "json_schema", "json_schema": False}, "format.json_schema: it must be a JSON schema"),
        ({"type": "json_schema", "json_schema": {"type": "object", "not": {}}}, "not"),
        ({"type": "regex", "pattern": "(?=a)b"}, "look"),
        ({"type": "grammar", "grammar": "%llguidance {}\nstart: /a/"}, "%llguidance is not taken"),
        ({"type": "grammar", "grammar": "start: nobody"}, "nobody"),
        ({"type": "sequence", "elements": []}, "format.elements: it must be a list that is not empty"),
        (sequence(ANY, JSON), "format.elements[0]: free text must be followed by a text"),
        (sequence(ANY, triggered(FOX, at_least_one=True)), "format.elements[0]: free text must be followed by a text"),
        (sequence(triggered(FOX), JSON), "format.elements[0]: free text must be followed by a text"),
        ({"type": "star", "content": ANY}, "format: free text at the end of what may come again"),
        (triggered(tag("<f=a>", ANY, "")), "format.tags[0]: free text in a tag needs an `end`"),
        (triggered(tag("<g>", ANY, "x")), "format.tags[0]: one trigger must be the beginning of '<g>', got 0"),
        (triggered(FOX, triggers=["<f=", "<f=fox"]), "format.triggers: '<f=' stands in '<f=fox'"),
        (tag("", triggered(FOX), "<f=fox>"), "and a trigger stand in each other"),
        (triggered(FOX, at_least_one=1), "format.at_least_one: it must be true or false"),
        (separated({"type": "or", "elements": [ANY]}), "format.tags[0]: it must be a tag"),
        (QWEN | {"json_schema": PERSON | {"additionalProperties": True}}, "without additionalProperties"),
        (QWEN | {"json_schema": PERSON | {"anyOf": []}}, "'anyOf' cannot be followed"),
        (QWEN | {"json_schema": {"properties": {"a": {"type": "string", "pattern": "a"}}}}, "'pattern' cannot be"),
        (QWEN | {"json_schema": {"properties": {"a": {"type": ["string", "null"]}}}}, "of type string, or of others"),
        (QWEN | {"json_schema": {"properties": {"a": {"anyOf": []}}}}, "'anyOf' cannot be followed of a text"),
    ],
)  # fmt: skip
def test_what_cannot_be_followed_is_named_with_its_place(words: Vocabulary, format_: dict[str, Any], told: str) -> None:
    with pytest.raises(PenstockError) as refused:
        GrammarCompiler(words).compile(StructuredOutputsParams(structural_tag=json.dumps({"format": format_})))
    assert (refused.value.code, refused.value.param) == (ErrorCode.INVALID_ARGUMENT, "structured_outputs")
    assert told in refused.value.message


def test_formats_may_not_stand_in_each_other_for_ever(words: Vocabulary) -> None:
    format_: dict[str, Any] = ANY
    for _ in range(65):
        format_ = sequence(format_)
    with pytest.raises(PenstockError, match="64 deep"):
        GrammarCompiler(words).compile(StructuredOutputsParams(structural_tag=json.dumps({"format": format_})))


@pytest.mark.parametrize("tag_", [{"type": "tag", "format": ANY}, {"format": ANY, "triggers": []}])
def test_beside_a_format_there_is_nothing(words: Vocabulary, tag_: dict[str, Any]) -> None:
    with pytest.raises(PenstockError, match="structural_tag"):
        GrammarCompiler(words).compile(StructuredOutputsParams(structural_tag=json.dumps(tag_)))
