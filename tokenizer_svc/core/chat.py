"""Chat templates: Jinja in an immutable sandbox, with the names and settings that Hugging Face templates expect."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from penstock.domain.errors import invalid
from penstock.domain.request import Message
from tokenizer_svc.core.checkpoint import broken

MAX_RENDERED_CHARS = 16 * 2**20
_RESERVED = frozenset({"messages", "raise_exception", "strftime_now"})


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's words for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012  the base class declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Macro) -> str:
        return str(caller())


class _Refused(jinja2.TemplateError):
    """The template itself called `raise_exception`."""


def _raise_exception(message: str) -> NoReturn:
    raise _Refused(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, > and & for HTML; models were trained on JSON without that.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _clock_at(now_ns: int) -> Callable[[str], str]:
    moment = datetime.fromtimestamp(now_ns / 1e9, UTC)
    return moment.strftime


class ChatTemplates:
    """The named chat templates of one model, compiled once.

    Args:
        templates: source by name; `default` is used, and `tool_use`, if there is one, for requests with tools.
        special_tokens: what the templates may write: bos_token, eos_token and the like.

    Raises:
        PenstockError: INTERNAL (operator): a template is not valid Jinja.
    """

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, Any]) -> None:
        environment = _environment()
        self._special_tokens = dict(special_tokens)
        self.sources = dict(templates)  # by name
        self._templates: dict[str, jinja2.Template] = {}
        for name, source in templates.items():
            try:
                self._templates[name] = environment.from_string(source)
            except jinja2.TemplateSyntaxError as error:
                raise broken(
                    f"the chat template {name!r} of this model is not valid Jinja (line {error.lineno}: "
                    f"{error.message}); mend chat_template in the checkpoint"
                ) from error

    def __bool__(self) -> bool:
        return bool(self._templates)

    def render(self, messages: Sequence[Message], kwargs: Mapping[str, Any] | None = None, now_ns: int = 0) -> str:
        """The prompt text of a conversation.

        Args:
            messages: at least one.
            kwargs: the caller's: tools, documents, add_generation_prompt (default true), continue_final_message,
                and whatever else the template reads.
            now_ns: Unix time, nanoseconds, for templates that write the date (UTC).

        Raises:
            PenstockError: INVALID_ARGUMENT: no template, no messages, or the template refuses them.
        """
        variables = dict(kwargs or {})
        if forbidden := _RESERVED & variables.keys():
            raise invalid(f"chat_template_kwargs must not set {min(forbidden)}", "chat_template_kwargs")
        if not messages:
            raise invalid("messages must hold at least one message", "messages")
        continue_final = bool(variables.pop("continue_final_message", False))
        add_generation_prompt = bool(variables.pop("add_generation_prompt", not continue_final))
        if continue_final and add_generation_prompt:
            raise invalid(
                "continue_final_message and add_generation_prompt exclude each other", "continue_final_message"
            )
        tools = variables.pop("tools", None) or None
        documents = variables.pop("documents", None) or None
        conversation = [
            {"role": message.role, "content": message.content, **(message.extra or {})} for message in messages
        ]
        text = self._run(
            self._choose(with_tools=tools is not None),
            {
                **self._special_tokens,
                **variables,
                "messages": conversation,
                "tools": tools,
                "documents": documents,
                "add_generation_prompt": add_generation_prompt,
                "strftime_now": _clock_at(now_ns),
            },
        )
        return _cut_behind(text, messages[-1].content) if continue_final else text

    def _choose(self, *, with_tools: bool) -> jinja2.Template:
        if with_tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" in self._templates:
            return self._templates["default"]
        raise invalid("this model has no chat template: send the prompt as text or token ids", "messages")

    def _run(self, template: jinja2.Template, variables: dict[str, Any]) -> str:
        parts: list[str] = []
        num_chars = 0
        try:
            for part in template.generate(variables):
                num_chars += len(part)
                if num_chars > MAX_RENDERED_CHARS:
                    raise invalid(f"the rendered chat exceeds {MAX_RENDERED_CHARS} characters", "messages")
                parts.append(part)
        except _Refused as error:
            raise invalid(f"the chat template refuses these messages: {error.message}", "messages") from error
        except jinja2.exceptions.SecurityError as error:
            raise broken(f"the chat template of this model does what the sandbox forbids: {error}") from error
        # Whatever else goes wrong inside a template depends on the messages it was given: a missing key, None joined
        # to a string, a recursion without an end.
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError,
                RecursionError, OverflowError) as error:  # fmt: skip
            raise invalid(
                f"the chat template cannot render these messages ({type(error).__name__}: {str(error)[:300]})",
                "messages",
            ) from error
        return "".join(parts)


def _cut_behind(text: str, content: str) -> str:
    """`text` up to the end of the final message's content, so that the model goes on with that message."""
    final = content.rstrip()
    start = text.rfind(final)
    if not final or start < 0:
        raise invalid(
            "continue_final_message needs a final message whose content the chat template writes as it is",
            "continue_final_message",
        )
    end = start + len(content)
    # A template that trims its messages leaves out the blanks at the end; one that does not keeps them.
    return text[:end] if text[start:end] == content else text[: start + len(final)]
