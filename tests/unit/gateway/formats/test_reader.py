"""Outputs of each family, cut in every way: what is told does not depend on the cuts."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from outputs import CALLS, EXAMPLES, THOUGHTS, Told, form, read

from gateway_svc.core.formats.output_format import OutputFormat
from gateway_svc.core.formats.pieces import Piece
from gateway_svc.core.formats.reading import reader_of
from gateway_svc.core.formats.registry import REASONING_FORMATS, TOOL_FORMATS
from gateway_svc.core.formats.think import THINK

NAMES = sorted(TOOL_FORMATS)
_WORDS = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>"),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "function<｜tool▁sep｜>",
        "<｜tool▁sep｜>",
        "\n```json\n",
        "\n```",
    ),
    *("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *("<|start|>assistant", "<|channel|>analysis", "<|channel|>final", "<|channel|>commentary", "<|message|>"),
    *("<|end|>", "<|call|>", "<|return|>", "<|constrain|>json", " to=functions.f", " to=", "<|"),
    *('{"name": "f", "arguments": ', '{"name": "f", "parameters": ', '"name": "f"', '{"a": [1, "}"]}', "{}", "}", "]"),
    *("[f(a=1)", "f(a='x')", "[", ",", ";", "f", "hello", " ", "\n", '"', "\\", "<", "<|im_end|>", "<t", "1", "é"),
)
OUTPUTS = st.one_of(
    st.lists(st.sampled_from(_WORDS), max_size=14).map("".join),
    st.builds(
        lambda before, one, at, after: before + one[:at] + after + one[at:],
        st.sampled_from(["", " ", "hm\n", "<think>a</think>\n\n", "<think>\n"]),
        st.sampled_from([spelling for _, spelling in EXAMPLES]),
        st.integers(0, 200),
        st.one_of(st.just(""), st.sampled_from(_WORDS)),
    ),
)


def same(pieces: list[Piece]) -> list[tuple[str, str]]:
    """Pieces one after the other, those of a kind as one but for names of calls."""
    joined: list[tuple[str, str]] = []
    for piece in pieces:
        if joined and joined[-1][0] == piece.kind.value != "call":
            joined[-1] = piece.kind.value, joined[-1][1] + piece.text
        elif piece.text or piece.kind.value == "call":
            joined.append((piece.kind.value, piece.text))
    return joined


def parts_of(text: str, cuts: list[int]) -> list[str]:
    places = sorted({min(each, len(text)) for each in cuts})
    return [text[start:stop] for start, stop in zip([0, *places], [*places, len(text)], strict=True)]


@settings(max_examples=1500)
@given(st.sampled_from(NAMES), OUTPUTS, st.lists(st.integers(0, 400), max_size=12), st.booleans())
def test_what_is_told_does_not_depend_on_how_the_text_is_cut(
    name: str, text: str, cuts: list[int], is_reasoning: bool
) -> None:
    whole, cut = (reader_of(form(name, is_reasoning=is_reasoning)) for _ in range(2))
    expected = [*whole.feed(text), *whole.end()]
    found = [piece for part in parts_of(text, cuts) for piece in cut.feed(part)] + cut.end()
    assert same(found) == same(expected)
    assert cut.at == whole.at == len(text)
    singly = reader_of(form(name, is_reasoning=is_reasoning))
    assert same([piece for character in text for piece in singly.feed(character)] + singly.end()) == same(expected)


@settings(max_examples=1500)
@given(st.sampled_from(NAMES), OUTPUTS, st.lists(st.integers(0, 400), max_size=6), st.integers(0, 400), st.randoms())
def test_who_goes_on_tells_exactly_what_was_not_told(
    name: str, text: str, cuts: list[int], heard: int, rng: random.Random
) -> None:
    first = reader_of(form(name))
    told = [piece for part in parts_of(text[:heard], cuts) for piece in first.feed(part)]
    place = first.at
    second = reader_of(form(name))
    known = second.feed(text[:place])
    later = [*second.feed(text[place:heard]), *second.feed(text[heard:])]
    rest = [left for piece in [*known, *later] if (left := piece.after(place))]
    whole = reader_of(form(name))
    expected = [*whole.feed(text), *whole.end()]
    assert same([*told, *rest, *second.end()]) == same(expected)


@settings(max_examples=600)
@given(st.sampled_from(NAMES), OUTPUTS)
def test_pieces_follow_each_other_and_plain_ones_are_the_text(name: str, text: str) -> None:
    reader, at = reader_of(form(name)), 0
    for piece in [*reader.feed(text), *reader.end()]:
        assert at <= piece.end
        assert piece.start >= at or not piece.is_plain
        if piece.is_plain:
            assert text[piece.start : piece.end] == piece.text
        at = piece.end


@pytest.mark.parametrize(("name", "spelling"), EXAMPLES)
def test_calls_are_read(name: str, spelling: str) -> None:
    thought = THOUGHTS.get(name, "<think>\nhm\n</think>\n\n")
    for before, told in (("", Told()), (thought, Told(reasoning="hm"))):
        found = read(form(name), [f"{before}{spelling}<|im_end|>"])
        assert (found.reasoning, found.content) == (told.reasoning, "")
        calls = [(each, json.loads(arguments)) for each, arguments in found.calls]
        assert calls == [(each, json.loads(arguments)) for each, arguments in CALLS]


def message(channel: str, text: str, end: str = "<|end|><|start|>assistant") -> str:
    return f"<|channel|>{channel}<|message|>{text}{end}"


CALL = message("commentary to=functions.f <|constrain|>json", '{"a": 1}', "<|call|>")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (message("analysis", "hm") + message("final", "so", "<|return|>"), Told("hm", "so")),
        (message("analysis", "a") + message("analysis", " b ") + CALL, Told("a\n b ", calls=[("f", '{"a": 1}')])),
        (message("commentary", "I look.") + CALL, Told(content="I look.", calls=[("f", '{"a": 1}')])),
        (message("commentary", "a") + message("final", "b", ""), Told(content="a\nb")),
        (message("analysis to=browser.search code", "x") + message("final", "y", ""), Told("x", "y")),
        (message("commentary to=python", "x", ""), Told(content="x")),
        (" to=functions.f<|channel|>analysis<|message|>{}<|call|>", Told(calls=[("f", "{}")])),
        (message("final", "a <|end", ""), Told(content="a <|end")),
        (message("final", "a<|im_end|>b", ""), Told(content="ab")),
        ("<|channel|>final", Told()),
        ("<|channel|>analysis<|end|>" + message("final", "a", ""), Told(content="a")),
        (message("analysis", "a", "<|channel|>final<|message|>b"), Told("a", "b")),
        (" told before<|return|>", Told(content=" told before")),
        ("<|channel|>" + "x" * 20_000, Told(content="x" * 20_000)),
        ("", Told()),
    ],
)
def test_messages_are_told_by_their_channels(text: str, told: Told) -> None:
    assert read(form("harmony"), [text]) == told
    assert read(form("harmony"), list(text)) == told


def test_messages_without_functions_or_thoughts_are_content() -> None:
    text = message("analysis", "a") + CALL
    assert read(OutputFormat(TOOL_FORMATS["harmony"]), [text]) == Told(content="a", calls=[("f", '{"a": 1}')])
    assert read(OutputFormat(reasoning=REASONING_FORMATS["harmony"]), [text]) == Told("a", '{"a": 1}')


def test_an_output_may_begin_inside_of_a_thought_of_several_messages() -> None:
    text = "b<|end|><|start|>assistant" + message("final", "c", "")
    assert read(form("harmony", is_reasoning=True), [text]) == Told("b", "c")


@pytest.mark.parametrize("name", ["hermes", "deepseek", "mistral", "glm"])
def test_text_before_calls_is_content_and_the_space_between_is_not(name: str) -> None:
    (spelling, *_) = [spelling for each, spelling in EXAMPLES if each == name]
    told = read(form(name), ["Let me look.\n\n", spelling, "\n"])
    assert told.content == "Let me look."
    assert [each for each, _ in told.calls] == ["f", "g"]


def test_arguments_come_as_they_are_written() -> None:
    reader = reader_of(form("hermes"))
    told = [*reader.feed('<tool_call>{"name": "f", "arguments": {"path": "a')]
    assert [piece.text for piece in told] == ["f", '{"path": "a']
    assert [piece.text for piece in reader.feed('bc\\"d')] == ['bc\\"d']
    assert [piece.text for piece in reader.feed('"}}</tool')] == ['"}']
    assert reader.feed("_call>") == reader.end() == []


def test_the_end_of_a_text_may_be_the_beginning_of_a_mark() -> None:
    reader = reader_of(form("hermes"))
    assert [piece.text for piece in reader.feed("a <tool")] == ["a"]
    assert reader.at == 1
    assert [piece.text for piece in reader.feed("s are fine")] == [" <tools are fine"]


def _pair(key: str, value: str) -> str:
    return f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>"


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("hermes", "<tool_call>nonsense</tool_call>", Told(content="<tool_call>nonsense</tool_call>")),
        ("hermes", 'a <tool_call>{"name": "f"}</tool_call>', Told(content='a <tool_call>{"name": "f"}</tool_call>')),
        ("hermes", '<tool_call>{"name": "f", "argum', Told(content='<tool_call>{"name": "f", "argum')),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', Told(calls=[("f", '{"a": 1}')])),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1</tool_call>', Told(calls=[("f", '{"a": [1')])),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}', Told(calls=[("f", '{"a": 1}')])),
        ("hermes", "a</tool_call>", Told(content="a</tool_call>")),
        ("llama3_json", '{"name": "Bob", "age": 3}', Told(content='{"name": "Bob", "age": 3}')),
        ("llama3_json", 'Yes: {"name": "f", "parameters": {}}', Told(content='Yes: {"name": "f", "parameters": {}}')),
        ("pythonic", "[1, 2]", Told(content="[1, 2]")),
        ("pythonic", "[f(a=1), and so on]", Told(content=", and so on]", calls=[("f", '{"a": 1}')])),
        ("pythonic", "[f(open('x'))]", Told(content="[f(open('x'))]")),
        ("pythonic", "[f(a=-1.50e3, b=1e999, c=0x10)]", Told(calls=[("f", '{"a": -1.50e3, "b": 1e999, "c": 16}')])),
        ("pythonic", r"[f(a='\ud83d\ude00é')]", Told(calls=[("f", r'{"a": "\ud83d\ude00\u00e9"}')])),
        ("pythonic", "[f(a=1, a=2)]", Told(calls=[("f", '{"a": 2}')])),
        ("mistral", "[TOOL_CALLS] none", Told(content="[TOOL_CALLS] none")),
        ("glm", "<tool_call>f\n</tool_call>", Told(calls=[("f", "{}")])),
        ("glm", "<tool_call>f\n<arg_key>n</arg_key><arg", Told(calls=[("f", "<arg_key>n</arg_key><arg")])),
        ("glm", f"<tool_call>f {_pair('path', '12')}</tool_call>", Told(calls=[("f", '{"path": "12"}')])),
        ("glm", f"<tool_call>f {_pair('k', 'a b')}</tool_call>", Told(calls=[("f", '{"k": "a b"}')])),
    ],
)  # fmt: skip
def test_what_is_no_call_is_not_lost_and_not_repaired(name: str, text: str, told: Told) -> None:
    assert read(form(name), [text]) == told


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("<think>\na\n\nb\n</think>\n\nc\n", Told("a\n\nb", "c\n")),
        ("<think>\n\n</think>\n\nc", Told("", "c")),
        ("<think>a", Told("a")),
        ("say <think>a</think>", Told("", "say <think>a</think>")),
        (" \nplain", Told("", " \nplain")),
    ],
)
def test_thoughts_are_told_apart(text: str, told: Told) -> None:
    assert read(OutputFormat(reasoning=THINK), [text]) == told


def test_an_output_may_begin_inside_of_a_thought() -> None:
    opened = OutputFormat(reasoning=THINK, is_reasoning=True)
    assert read(opened, ["\na</th", "ink>b"]) == Told("a", "b")
    assert read(opened, ["a and so on"]) == Told("a and so on")


def test_special_tokens_are_not_told() -> None:
    shown = OutputFormat(hidden=("<|eot|>", "<|eom|>"))
    assert read(shown, ["a<|e", "om|> b<|eot|>"]) == Told("", "a b")


def test_a_call_that_does_not_show_itself_is_content() -> None:
    text = '<tool_call>{"name": "' + "x" * 20_000
    assert read(form("hermes"), [text]) == Told(content=text)
