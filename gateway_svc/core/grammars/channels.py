"""Rules of outputs that are messages on channels: thoughts first, then one call, or an answer.

A call ends the output, so there is never more than one. The marks that end outputs are end tokens and stand in no rule.
"""

from collections.abc import Iterable

from contract.domain.errors import invalid
from contract.domain.structured_outputs import JSON_FORMS, StructuredOutputsParams, spaced_schema
from gateway_svc.core.formats.channels import Channels
from gateway_svc.core.formats.choice import ModelFormats
from gateway_svc.core.grammars.calls import call_rules
from gateway_svc.core.grammars.terms import Speller, json_value, literal, terms, without
from gateway_svc.core.tools import ToolUse


def channel_rules(
    use: ToolUse | None,
    formats: ModelFormats,
    speller: Speller,
    *,
    is_thinking: bool,
    answer: StructuredOutputsParams | None,
) -> Iterable[str]:
    """The rules of an output; the arguments are those of `output_grammar`."""
    words = formats.channels
    assert words is not None
    thoughts = formats.reasoning is not None
    text, rule = speller.up_to("text", words.end, *words.marks)
    yield rule
    rest = f"{text} {speller.spell(f'{words.start}{words.role}')}"  # of a message that another one follows
    yield f"thought: {speller.spell(words.opening(words.thoughts))} {rest}"
    yield f"remark: {speller.spell(words.opening(words.remarks))} {rest}"
    yield f"final: {speller.spell(words.opening(words.answer))} {_answer(answer)}"
    yield f"ANSWER: {without(*words.marks)}"
    is_free = answer is None and not (use and use.must_call)
    before = f"({'thought | ' if thoughts else ''}remark)*" if is_free else "thought?" if thoughts else ""
    if is_thinking:
        before = f"{rest} {before if is_free else ''}"
    last = " | ".join([*(["call_0"] if use else []), *(["final"] if not (use and use.must_call) else [])])
    yield f"start: {terms(before, f'({last})')}"
    if use is not None:
        assert formats.tools is not None
        yield from call_rules(0, formats.tools.written[0], use, speller)


def _answer(form: StructuredOutputsParams | None) -> str:
    """The term of an answer."""
    if form is None:
        return "ANSWER"
    if form.said in JSON_FORMS:
        return json_value(spaced_schema(form))
    return f"({' | '.join(map(literal, form.choice or ()))})"


def check_answer(form: StructuredOutputsParams, words: Channels) -> None:
    """Check that an answer on a channel can have a form.

    Raises:
        PenstockError: INVALID_ARGUMENT: it cannot.
    """
    if form.said not in (*JSON_FORMS, "choice"):
        raise invalid(
            f"structured_outputs.{form.said} is not done for a model that answers in messages (after "
            f"{words.channel}{words.answer}): take json, json_object or choice",
            "structured_outputs",
        )
