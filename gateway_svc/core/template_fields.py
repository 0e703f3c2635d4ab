"""The fields of a chat's body that are for its chat template."""

from typing import Any, Protocol

from contract.domain.errors import invalid
from gateway_svc.core.messages import check_depth

_VARIABLES = ("documents", "reasoning_effort")  # that a template may read or not
_FIELDS = ("chat_template", "add_generation_prompt", "continue_final_message", *_VARIABLES)


class TemplateFields(Protocol):
    """A body that has them, as vLLM has it."""

    @property
    def chat_template_kwargs(self) -> dict[str, Any] | None: ...  # noqa: D102

    @property
    def documents(self) -> list[dict[str, Any]] | None: ...  # noqa: D102


def template_kwargs(raw: TemplateFields) -> dict[str, Any] | None:
    """The variables of the chat template: `chat_template_kwargs`, and what stands beside it.

    Raises:
        PenstockError: INVALID_ARGUMENT naming the field: it contradicts another one, or is nested too deeply.
    """
    check_depth("chat_template_kwargs", raw.chat_template_kwargs)
    check_depth("documents", {"documents": raw.documents})
    kwargs = dict(raw.chat_template_kwargs or {})
    for name in _FIELDS:
        value = getattr(raw, name)
        if value is not None and kwargs.setdefault(name, value) != value:
            raise invalid(f"{name} and chat_template_kwargs.{name} contradict each other", name)
    if kwargs.get("continue_final_message") and kwargs.get("add_generation_prompt"):
        raise invalid("continue_final_message and add_generation_prompt exclude each other", "continue_final_message")
    return kwargs or None


def required_variables(raw: TemplateFields) -> tuple[str, ...]:
    """The names among them that the template must read: they were asked for by fields of their own."""
    return tuple(name for name in _VARIABLES if getattr(raw, name))
