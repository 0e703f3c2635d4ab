"""Grammars of outputs that call functions or have a form: thoughts if there are any, then calls, or an answer."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from contract.domain.errors import invalid
from contract.domain.structured_outputs import MAX_FORM_BYTES, StructuredOutputsParams, spaced_schema
from gateway_svc.core.formats.choice import ModelFormats
from gateway_svc.core.formats.table import ReasoningFormat, ToolFormat
from gateway_svc.core.formats.written import Written
from gateway_svc.core.grammars.calls import call_rules
from gateway_svc.core.grammars.channels import channel_rules
from gateway_svc.core.grammars.terms import Speller, json_value, options, terms, without
from gateway_svc.core.tools import ToolUse

_SPACE = r"/[ \r\n\t]*/"


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
    speller = Speller(formats.facts.marks)
    write = _rules if formats.channels is None else channel_rules
    lines = write(use, formats, speller, is_thinking=is_thinking, answer=answer)
    grammar = "\n".join(lines)
    if len(grammar.encode()) > MAX_FORM_BYTES:
        raise invalid(
            f"the functions that must be called rightly may have {MAX_FORM_BYTES // 1024} KiB of schemas together",
            "tools" if use is not None else "structured_outputs",
        )
    return StructuredOutputsParams(grammar=grammar)


def _rules(
    use: ToolUse | None,
    formats: ModelFormats,
    speller: Speller,
    *,
    is_thinking: bool,
    answer: StructuredOutputsParams | None,
) -> Iterable[str]:
    """The rules of an output that is one text."""
    thoughts = _thoughts(formats.reasoning, speller, is_thinking=is_thinking)
    output, rules = "answer", [] if answer is None else [f"answer: {json_value(spaced_schema(answer))}"]
    if use is not None:
        assert formats.tools is not None
        tools, ways = formats.tools, _ways(formats)
        if use.must_call or tools.is_bare or answer is not None:
            output = "calls" if use.must_call else "answer | calls" if answer is not None else "PROSE? | calls"
            rules.append(f"calls: {options('calls', len(ways))}")
            rules += [rule for index, way in enumerate(ways) for rule in _calls(index, way, use, speller)]
            rules += [_prose(tools, ways)] if "PROSE" in output else []
        else:
            output = "text"
            rules += _text(tools, ways, use, speller)
    return [f"start: {'thoughts ' if thoughts else ''}({output})", *thoughts, *rules]


def _ways(formats: ModelFormats) -> Sequence[Written]:
    """The ways in which the model may be made to write calls; at least one."""
    assert formats.tools is not None
    return [each for each in formats.tools.written if not each.needs or each.needs in formats.facts.marks]


def _thoughts(form: ReasoningFormat | None, speller: Speller, *, is_thinking: bool) -> list[str]:
    """Rules of what the model thinks first; none: it does not."""
    if form is None:
        return []
    inside, rule = speller.up_to("thought", form.closes)
    inside = f"{inside} {_SPACE}"
    return [f"thoughts: {inside}" if is_thinking else f"thoughts: ({speller.spell(form.opens)} {inside})?", rule]


def _calls(index: int, way: Written, use: ToolUse, speller: Speller) -> Iterable[str]:
    """Rules of one call after the other."""
    again = "" if use.is_single else f"({terms(speller.spell(way.between), f'call_{index}')})*"
    yield f"calls_{index}: {terms(speller.spell(way.first), f'call_{index}', again, speller.spell(way.last))}"
    yield from call_rules(index, way, use, speller)


def _prose(tools: ToolFormat, ways: Sequence[Written]) -> str:
    """The rule of an output that is no call where calls have no mark."""
    first = re.escape("".join((each.first or each.begin)[0] for each in ways))
    return f"PROSE: /[^{first} \\t\\r\\n](.|\\n)*/ & {without(*tools.opens)}"


def _text(tools: ToolFormat, ways: Sequence[Written], use: ToolUse, speller: Speller) -> Iterable[str]:
    """Rules of text with calls in it: after the mark that opens them there is nothing else."""
    opens = tools.opens[0]
    marks = [_opening(way, opens) for way in ways]
    is_token = all(map(speller.is_token, marks))
    units = " | ".join(f"unit_{index}" for index in range(len(ways)))
    if is_token:
        yield f"text: TEXT ({units})?" if use.is_single else f"text: TEXT (({units}) TEXT)*"
    else:
        yield f"text: TEXT | {units}" if use.is_single else f"text: ({units})* TEXT"
    yield f"TEXT: {without(*dict.fromkeys((*marks, *tools.opens)))}"
    for index, (way, mark) in enumerate(zip(ways, marks, strict=True)):
        opening = speller.spell(mark)
        if not is_token:
            opening, rule = speller.up_to(f"opening_{index}", mark)
            yield rule
        if way.first:
            again = "" if use.is_single else f"({terms(speller.spell(way.between), f'call_{index}')})*"
            rest = speller.spell(way.first.removeprefix(mark))
            yield f"unit_{index}: {terms(opening, rest, f'call_{index}', again, speller.spell(way.last))}"
            yield from call_rules(index, way, use, speller)
        else:
            yield f"unit_{index}: {terms(opening, f'call_{index}')}"
            yield from call_rules(index, replace(way, begin=way.begin.removeprefix(mark)), use, speller)


def _opening(way: Written, opens: str) -> str:
    """The mark with which all that is a call begins."""
    text = way.first or way.begin
    return opens if text.startswith(opens) else way.first
