"""Grammars of outputs that call functions or have a form: thoughts if there are any, then calls, or an answer."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from contract.domain.chat_facts import Mark
from contract.domain.errors import invalid
from contract.domain.structured_outputs import (
    JSON_WHITE_SPACE,
    MAX_FORM_BYTES,
    StructuredOutputsParams,
    spaced_schema,
)
from gateway_svc.core.formats.choice import ModelFormats
from gateway_svc.core.formats.registry import TOOL_FORMATS
from gateway_svc.core.formats.table import ReasoningFormat
from gateway_svc.core.formats.written import Written
from gateway_svc.core.tools import Function, ToolUse

_ANY = r"/(.|\n)*/"
_SPACE = r"/[ \r\n\t]*/"
_PROSE = r"prose: /([^{ \t\r\n](.|\n)*)?/"  # what is no call where calls have no mark
_SPACED = "x-guidance", {"whitespace_flexible": True, "whitespace_pattern": JSON_WHITE_SPACE}


def output_grammar(
    use: ToolUse | None, formats: ModelFormats, *, is_thinking: bool, answer: StructuredOutputsParams | None = None
) -> StructuredOutputsParams:
    """The form of outputs that use functions as they may, and answer as they must.

    Args:
        use: the functions and what holds of them; None: there are none.
        formats: of the model.
        is_thinking: the prompt ends inside of a thought.
        answer: the form, one of JSON, of what is neither thought nor call; None: any.

    Raises:
        PenstockError: INVALID_ARGUMENT: the model's format cannot be held to, or the schemas are too long.
    """
    speller = _Speller(formats.facts.marks)
    thoughts = _thoughts(formats.reasoning, speller, is_thinking=is_thinking)
    output, rules = "answer", [] if answer is None else [f"answer: %json {json.dumps(spaced_schema(answer))}"]
    if use is not None:
        assert formats.tools is not None
        tools, ways = formats.tools, _ways(use, formats, has_form=answer is not None)
        if use.must_call or tools.is_bare or answer is not None:
            output = "calls" if use.must_call else "answer | calls" if answer is not None else "prose | calls"
            rules.append(f"calls: {_options('calls', len(ways))}")
            rules += [rule for index, way in enumerate(ways) for rule in _calls(index, way, use, speller)]
            rules += [_PROSE] if "prose" in output else []
        else:
            output = "text"
            rules += _text(tools.name, ways, use, speller)
    lines = [f"start: {'thoughts ' if thoughts else ''}({output})", *thoughts, *rules]
    grammar = "\n".join(lines)
    if len(grammar.encode()) > MAX_FORM_BYTES:
        raise invalid(
            f"the functions that must be called rightly may have {MAX_FORM_BYTES // 1024} KiB of schemas together",
            "tools" if use is not None else "structured_outputs",
        )
    return StructuredOutputsParams(grammar=grammar)


def _ways(use: ToolUse, formats: ModelFormats, *, has_form: bool) -> Sequence[Written]:
    """The ways in which the model may be made to write calls; at least one."""
    assert formats.tools is not None
    ways = [each for each in formats.tools.written if not each.needs or each.needs in formats.facts.marks]
    if ways:
        return ways
    raise invalid(
        "tool_choice required or of one function, strict, parallel_tool_calls=false and a form of the output need a "
        f"grammar, and there is none of the format in which this model calls functions ({formats.tools.name}): use "
        "tool_choice auto",
        "tool_choice" if use.must_call else "tools" if use.is_strict or has_form else "parallel_tool_calls",
    )


class _Speller:
    """Writes texts as a model writes them: what is a token of its own as that token."""

    def __init__(self, marks: Mapping[str, Mark]) -> None:
        self._marks = marks
        longest_first = sorted(marks, key=len, reverse=True)
        self._parts = re.compile(f"({'|'.join(map(re.escape, longest_first))})" if marks else r"((?!))")

    def spell(self, text: str) -> str:
        """The terms of a text; empty for none."""
        return " ".join(self._term(part) for part in self._parts.split(text) if part)

    def is_token(self, text: str) -> bool:
        """Return whether a text is one token."""
        return text in self._marks

    def _term(self, part: str) -> str:
        mark = self._marks.get(part)
        return json.dumps(part) if mark is None else f"<[{mark.token_id}]>"


def _thoughts(form: ReasoningFormat | None, speller: _Speller, *, is_thinking: bool) -> list[str]:
    """Rules of what the model thinks first; none: it does not."""
    if form is None:
        return []
    inside, rules = "thought_to_end", [f"thought_to_end[lazy]: {_up_to(form.closes)}"]
    if speller.is_token(form.closes):
        inside, rules = f"{_ANY} {speller.spell(form.closes)}", []
    inside = f"{inside} {_SPACE}"
    return [f"thoughts: {inside}" if is_thinking else f"thoughts: ({speller.spell(form.opens)} {inside})?", *rules]


def _calls(index: int, way: Written, use: ToolUse, speller: _Speller) -> Iterable[str]:
    """Rules of one call after the other."""
    again = "" if use.is_single else f"({_terms(speller.spell(way.between), f'call_{index}')})*"
    yield f"calls_{index}: {_terms(speller.spell(way.first), f'call_{index}', again, speller.spell(way.last))}"
    yield from _call(index, way, use, speller)


def _call(index: int, way: Written, use: ToolUse, speller: _Speller) -> Iterable[str]:
    """Rules of one call of one of the functions."""
    yield f"call_{index}: {_options(f'call_{index}', len(use.functions))}"
    for number, each in enumerate(use.functions):
        schema = _schema(each, is_bound=use.must_call or each.is_strict)
        begin, end = speller.spell(f"{way.begin}{each.name}{way.middle}"), speller.spell(way.end)
        yield f"call_{index}_{number}: {_terms(begin, f'%json {json.dumps(schema)}', end)}"


def _text(name: str, ways: Sequence[Written], use: ToolUse, speller: _Speller) -> Iterable[str]:
    """Rules of text with calls in it: after the mark that opens them there is nothing else."""
    opens = TOOL_FORMATS[name].opens[0]
    marks = [_opening(way, opens) for way in ways]
    is_token = all(map(speller.is_token, marks))
    units = " | ".join(f"unit_{index}" for index in range(len(ways)))
    if is_token:
        yield f"text: {_ANY} ({units})?" if use.is_single else f"text: {_ANY} (({units}) {_ANY})*"
    else:
        yield f"text: {_ANY} | {units}" if use.is_single else f"text: ({units})* {_ANY}"
    for index, (way, mark) in enumerate(zip(ways, marks, strict=True)):
        opening = speller.spell(mark)
        if not is_token:
            opening = f"opening_{index}"
            yield f"{opening}[lazy]: {_up_to(mark)}"
        if way.first:
            again = "" if use.is_single else f"({_terms(speller.spell(way.between), f'call_{index}')})*"
            rest = speller.spell(way.first.removeprefix(mark))
            yield f"unit_{index}: {_terms(opening, rest, f'call_{index}', again, speller.spell(way.last))}"
            yield from _call(index, way, use, speller)
        else:
            yield f"unit_{index}: {_terms(opening, f'call_{index}')}"
            yield from _call(index, replace(way, begin=way.begin.removeprefix(mark)), use, speller)


def _opening(way: Written, opens: str) -> str:
    """The mark with which all that is a call begins."""
    text = way.first or way.begin
    return opens if text.startswith(opens) else way.first


def _schema(function: Function, *, is_bound: bool) -> dict[str, Any]:
    schema = dict(function.parameters) if is_bound else {}
    schema.setdefault("type", "object")
    schema.setdefault(*_SPACED)
    return schema


def _options(name: str, count: int) -> str:
    return " | ".join(f"{name}_{index}" for index in range(count))


def _terms(*terms: str) -> str:
    return " ".join(filter(None, terms))


def _up_to(mark: str) -> str:
    """The expression of a text up to the first time that a mark comes, with it."""
    return f"/(.|\\n)*{re.escape(mark)}/".replace("</", "<\\/")
