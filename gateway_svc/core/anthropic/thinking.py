"""The field `thinking`, in the words of chat templates."""

from collections.abc import Mapping

from contract.domain.errors import invalid, unimplemented
from gateway_svc.core.anthropic.fields import Thinking
from gateway_svc.core.formats.choice import ModelFormats

_KINDS = ("enabled", "disabled", "adaptive")
_DISPLAYS = (None, "summarized", "omitted")  # the first two tell thoughts, as they are


def thinking_switches(asked: Thinking | None, formats: ModelFormats) -> Mapping[str, bool]:
    """The variables with which a model's template turns thoughts on or off; none: it does as it does by itself.

    Raises:
        PenstockError: INVALID_ARGUMENT: the model cannot do what is asked, or that is nothing.
    """
    if asked is None or asked.type == "adaptive":
        return {}
    is_enabled, thinks = asked.type == "enabled", formats.reasoning is not None
    if is_enabled and not thinks:
        raise invalid("this model has no thoughts, as far as is known: leave thinking out", "thinking")
    switches = formats.facts.switches if thinks else ()
    if thinks and not is_enabled and not switches:
        raise invalid("the chat template of this model has no switch for its thoughts: leave thinking out", "thinking")
    return dict.fromkeys(switches, is_enabled)


def thinking_budget(asked: Thinking | None, formats: ModelFormats) -> int | None:
    """The tokens that a thought may have, where a token closes it; None: nothing but `max_tokens` ends it."""
    form = formats.reasoning
    return None if asked is None or form is None or form.closes not in formats.facts.marks else asked.budget_tokens


def check_thinking(asked: Thinking | None, max_tokens: int | None) -> None:
    """Makes sure that it says something.

    Raises:
        PenstockError: INVALID_ARGUMENT or UNIMPLEMENTED, naming the field.
    """
    if asked is None:
        return
    if asked.type not in _KINDS:
        raise unimplemented("thinking.type", f"thinking of type {asked.type[:40]!r}")
    if asked.display not in _DISPLAYS:
        raise unimplemented("thinking.display", f"thinking with display {str(asked.display)[:40]!r}")
    budget = asked.budget_tokens
    if (budget is not None) != (asked.type == "enabled"):
        raise invalid("thinking.budget_tokens goes with type enabled, and with no other", "thinking.budget_tokens")
    if budget is not None and (budget < 1 or (max_tokens is not None and budget >= max_tokens)):
        raise invalid("thinking.budget_tokens must be positive and less than max_tokens", "thinking.budget_tokens")
