"""A chat's outputs by its body: which functions may be called, what holds of the calls, and how they are read."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from contract.domain.errors import invalid
from contract.domain.params import SamplingParams
from contract.domain.structured_outputs import JSON_FORMS, StructuredOutputsParams
from gateway_svc.core.formats.choice import ModelFormats
from gateway_svc.core.formats.reading import OutputReading
from gateway_svc.core.formats.table import KeyedCall, ToolFormat
from gateway_svc.core.grammars.channels import check_answer
from gateway_svc.core.grammars.keyed import plain_texts
from gateway_svc.core.tool_grammars import output_grammar
from gateway_svc.core.tools import ToolFields, ToolUse, read_tools


@dataclass(frozen=True, slots=True)
class ChatOutput:
    """The outputs of one chat."""

    params: SamplingParams  # with what must be asked of the pipeline so that they can be read
    reading: OutputReading | None = None  # None: they are content as they are
    variables: Mapping[str, Any] = field(default_factory=dict)  # for the chat template, which must read them


def chat_output(
    raw: ToolFields, params: SamplingParams, kwargs: Mapping[str, Any], formats: ModelFormats
) -> ChatOutput:
    """The outputs that a body asks for.

    Args:
        raw: its fields.
        params: its parameters.
        kwargs: what its chat template is given beside tools.
        formats: of the model.

    Raises:
        PenstockError: INVALID_ARGUMENT naming the field that cannot be done.
    """
    use, form = read_tools(raw), params.structured_outputs
    if use is not None and not params.detokenize:
        raise invalid("tools need detokenize: calls are found in the text", "detokenize")
    tools = None if use is None else _format_of(use, formats)
    if use is not None and kwargs.get("tools", raw.tools) != raw.tools:
        raise invalid("tools and chat_template_kwargs.tools contradict each other", "tools")
    if form is not None:
        formats = _beside_form(form, use, formats)
    if tools is None and formats.reasoning is None:
        return ChatOutput(params)
    is_thinking = _is_thinking(kwargs, formats)
    is_held = form is not None or (use is not None and (use.must_call or use.is_strict or use.is_single))
    if is_held:
        _check_beginning(kwargs, formats, is_thinking=is_thinking)
        grammar = output_grammar(use, formats, is_thinking=is_thinking, answer=form)
        params = replace(params, structured_outputs=grammar)
    params = _with_ends(params, formats)
    shows_special = not params.skip_special_tokens
    if not shows_special and _has_special_marks(tools, formats):
        params = replace(params, skip_special_tokens=False)
    return ChatOutput(
        params,
        OutputReading(
            tool_format="" if tools is None else tools.name,
            reasoning_format="" if formats.reasoning is None else formats.reasoning.name,
            begins_thinking=is_thinking,
            without_reasoning=raw.include_reasoning is False,
            hidden=() if shows_special or params.skip_special_tokens else _hidden(tools, formats),
            closing_token_id=_closing_token_id(formats),
            texts=_texts(use, tools, is_held=is_held),
        ),
        {"tools": raw.tools} if use is not None else {},
    )


def _beside_form(form: StructuredOutputsParams, use: ToolUse | None, formats: ModelFormats) -> ModelFormats:
    """The formats of an output whose answer has a form: JSON may come after a thought, others are the whole output."""
    if (words := formats.channels) is not None:
        check_answer(form, words)
        if use is None or not use.must_call:
            return formats
    if form.said in JSON_FORMS and (use is None or not use.must_call):
        return formats
    if use is not None:
        raise invalid(
            "tools and the form of the output exclude each other where a function must be called, and unless the form "
            "is JSON: leave one of them out",
            "tools",
        )
    return replace(formats, reasoning=None)


def _format_of(use: ToolUse, formats: ModelFormats) -> ToolFormat:
    if formats.tools is None:
        raise invalid(
            f"tools are given ({use.functions[0].name!r:.140}), and it is not known how this model calls functions: "
            "leave them out, or have the operator set --tool-format",
            "tools",
        )
    return formats.tools


def _is_thinking(kwargs: Mapping[str, Any], formats: ModelFormats) -> bool:
    """Return whether the output begins inside of a thought."""
    if formats.reasoning is None:
        return False
    continued = kwargs.get("continue_final_message")
    if continued:
        return isinstance(continued, str) and continued != "content"
    return kwargs.get("add_generation_prompt", True) and formats.facts.is_thinking(kwargs)


def _check_beginning(kwargs: Mapping[str, Any], formats: ModelFormats, *, is_thinking: bool) -> None:
    """Check that an output that a grammar holds begins where the grammar does: with the header of a message."""
    continued = kwargs.get("continue_final_message", False)
    if formats.channels is None or is_thinking or kwargs.get("add_generation_prompt", not continued):
        return
    raise invalid(
        "tool_choice required or of one function, strict, parallel_tool_calls=false and a form of the output need a "
        "prompt that opens a message of this model's: leave out continue_final_message and add_generation_prompt",
        "continue_final_message" if continued else "add_generation_prompt",
    )


def _with_ends(params: SamplingParams, formats: ModelFormats) -> SamplingParams:
    """The parameters with the marks that end an output, whatever the checkpoint says of end tokens."""
    if formats.channels is None or params.ignore_eos:
        return params
    known = [formats.facts.marks[each].token_id for each in formats.channels.last if each in formats.facts.marks]
    return replace(params, stop_token_ids=tuple(dict.fromkeys((*(params.stop_token_ids or ()), *known))))


def _has_special_marks(tools: ToolFormat | None, formats: ModelFormats) -> bool:
    if formats.channels is not None:  # whatever is known of them: without them nothing can be told apart
        return True
    return any((mark := formats.facts.marks.get(text)) and mark.is_special for text in _marks(tools, formats))


def _hidden(tools: ToolFormat | None, formats: ModelFormats) -> tuple[str, ...]:
    """The special tokens that say nothing to the reader."""
    marks = _marks(tools, formats)
    return tuple(text for text, mark in formats.facts.marks.items() if mark.is_special and text not in marks)


def _marks(tools: ToolFormat | None, formats: ModelFormats) -> tuple[str, ...]:
    thoughts = () if formats.reasoning is None else formats.reasoning.marks
    return (*thoughts, *(() if tools is None else tools.marks))


def _closing_token_id(formats: ModelFormats) -> int | None:
    if formats.reasoning is None:
        return None
    mark = formats.facts.marks.get(formats.reasoning.closes)
    return None if mark is None else mark.token_id


def _texts(use: ToolUse | None, tools: ToolFormat | None, *, is_held: bool) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The parameters that are written as texts, where the format does not say it; `is_held`: by a grammar."""
    if use is None or tools is None or not any(isinstance(body.call, KeyedCall) for body in tools.bodies):
        return ()
    found = [(each.name, plain_texts(each) if is_held and use.is_bound(each) else each.texts) for each in use.functions]
    return tuple((name, texts) for name, texts in found if texts)
