"""Chat templates: Jinja in an immutable sandbox, with the names and settings that Hugging Face templates expect."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from contract.domain.errors import PenstockError, broken, invalid
from contract.domain.request import Message
from tokenizer_svc.core.content_format import walks_parts
from tokenizer_svc.core.conversation import (
    REASONING_KEYS,
    Conversation,
    conversation,
    with_joined_thoughts,
    with_null_contents,
    with_objects,
)

MAX_RENDERED_CHARS = 16 * 2**20
MAX_TEMPLATE_CHARS = 64 * 1024  # of one that a request brings
_REMEMBERED = 32  # of those
_RESERVED = frozenset({"messages", "raise_exception", "strftime_now"})
# Marks where a message ends that is to be continued; its space shows whether the template trims its messages.
_END = "PENSTOCK_END_OF_FINAL_MESSAGE "


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


class _UnrenderableError(Exception):
    """A template failed over what it was given; `args[0]` says how."""


@dataclass(frozen=True, slots=True)
class _Named:
    """One template."""

    source: str
    template: jinja2.Template
    keeps_parts: bool  # whether it walks the parts of a content
    variables: frozenset[str]  # that it reads

    @property
    def knows_developer(self) -> bool:
        """Return whether it has a word for messages with the role `developer`."""
        return "developer" in self.source


class ChatTemplates:
    """The named chat templates of one model, compiled once.

    Args:
        templates: source by name; `default` is used, and `tool_use`, if there is one, for requests with tools.
        special_tokens: what the templates may write: bos_token, eos_token and the like.
        trusts_requests: requests may bring templates of their own.

    Raises:
        PenstockError: INTERNAL (operator): a template is not valid Jinja.
    """

    def __init__(
        self, templates: Mapping[str, str], special_tokens: Mapping[str, Any], *, trusts_requests: bool = False
    ) -> None:
        self._environment = _environment()
        self._trusts_requests = trusts_requests
        self._compile_once = lru_cache(_REMEMBERED)(self._compile)  # of requests: most that bring one bring the same
        self._special_tokens = dict(special_tokens)
        self.sources = dict(templates)  # by name
        self._templates: dict[str, _Named] = {}
        for name, source in templates.items():
            try:
                self._templates[name] = self._compile(source)
            except jinja2.TemplateSyntaxError as error:
                raise broken(
                    f"the chat template {name!r} of this model is not valid Jinja (line {error.lineno}: "
                    f"{error.message}); mend chat_template in the checkpoint"
                ) from error

    def __bool__(self) -> bool:
        return bool(self._templates)

    @property
    def variables(self) -> frozenset[str]:
        """The variables that templates read."""
        return frozenset().union(*(each.variables for each in self._templates.values()))

    @property
    def special_texts(self) -> tuple[str, ...]:
        """The special tokens that templates may write by their names."""
        return tuple(token for token in self._special_tokens.values() if isinstance(token, str))

    def render(
        self,
        messages: Sequence[Message],
        kwargs: Mapping[str, Any] | None = None,
        now_ns: int = 0,
        *,
        required: Sequence[str] = (),
    ) -> str:
        """The prompt text of a conversation, as transformers' `apply_chat_template` makes it.

        Args:
            messages: at least one.
            kwargs: the caller's: tools, documents, chat_template (the name of one), add_generation_prompt (default
                true), continue_final_message (true, or the key of the final message that is continued), and whatever
                else the template reads.
            now_ns: Unix time, nanoseconds, for templates that write the date (UTC).
            required: names among `kwargs` that the template must read.

        Raises:
            PenstockError: INVALID_ARGUMENT: no template, no messages, or the template refuses them or does not read
                what it must.
        """
        variables = dict(kwargs or {})
        if forbidden := _RESERVED & variables.keys():
            raise invalid(f"chat_template_kwargs must not set {min(forbidden)}", "chat_template_kwargs")
        if not messages:
            raise invalid("messages must hold at least one message", "messages")
        continued = _continued_key(variables.pop("continue_final_message", False))
        add_generation_prompt = bool(variables.pop("add_generation_prompt", not continued))
        if continued and add_generation_prompt:
            raise invalid(
                "continue_final_message and add_generation_prompt exclude each other", "continue_final_message"
            )
        tools = variables.pop("tools", None) or None
        documents = variables.pop("documents", None) or None
        chosen = self._choose(variables.pop("chat_template", None), with_tools=tools is not None)
        if unread := [name for name in required if name not in chosen.variables]:
            raise invalid(f"this model's chat template does nothing with {unread[0]}", unread[0])
        told = conversation(messages, keeps_parts=chosen.keeps_parts, knows_developer=chosen.knows_developer)
        final = _mark_end(told, continued, chosen.source) if continued else ""
        text = self._render_one_of(
            chosen,
            _forms(told),
            {
                **self._special_tokens,
                **variables,
                "tools": tools,
                "documents": documents,
                "add_generation_prompt": add_generation_prompt,
                "strftime_now": _clock_at(now_ns),
            },
        )
        return _cut_at_end(text, final) if continued else text

    def _choose(self, name: object, *, with_tools: bool) -> _Named:
        if name is None:
            name = "tool_use" if with_tools and "tool_use" in self._templates else "default"
        elif name not in self._templates:
            return self._of_request(name)
        if (found := self._templates.get(str(name))) is not None:
            return found
        if not self._templates:
            raise invalid("this model has no chat template: send the prompt as text or token ids", "messages")
        raise invalid(
            f"this model has several chat templates and no default: choose one with chat_template ({self._names()})",
            "chat_template",
        )

    def _of_request(self, source: object) -> _Named:
        """A template that a request brings."""
        if not self._trusts_requests or not isinstance(source, str):
            raise invalid(
                f"chat_template must be the name of one of the model's templates ({self._names()}), got {source!r:.80};"
                " templates themselves are taken from requests where tokenizers have --trust-request-chat-template",
                "chat_template",
            )
        if len(source) > MAX_TEMPLATE_CHARS:
            raise invalid(f"chat_template may have {MAX_TEMPLATE_CHARS} characters, got {len(source)}", "chat_template")
        try:
            return self._compile_once(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise invalid(f"chat_template is not valid Jinja: {error}", "chat_template") from error

    def _compile(self, source: str) -> _Named:
        parsed = self._environment.parse(source)
        variables = frozenset(find_undeclared_variables(parsed))
        return _Named(source, self._environment.from_string(source), walks_parts(parsed), variables)

    def _names(self) -> str:
        return ", ".join(sorted(self._templates)) or "it has none"

    def _render_one_of(self, chosen: _Named, forms: Iterator[Conversation], variables: dict[str, Any]) -> str:
        """The text that the template makes of the first form of the messages that it can work with."""
        first: _UnrenderableError | None = None
        for messages in forms:
            try:
                return self._run_or_join(chosen, variables, messages)
            except _UnrenderableError as error:
                first = first or error
        raise invalid(f"the chat template cannot render these messages ({first})", "messages") from first

    def _run_or_join(self, chosen: _Named, variables: dict[str, Any], messages: Conversation) -> str:
        """The text of messages; gpt-oss's template refuses those that think, say something and call functions."""
        try:
            return self._run(chosen, {**variables, "messages": messages})
        except _Refused as error:
            joined = with_joined_thoughts(messages)
            if joined != messages:
                with suppress(_Refused):
                    return self._run(chosen, {**variables, "messages": joined})
            raise invalid(f"the chat template refuses these messages: {error.message}", "messages") from error

    def _run(self, chosen: _Named, variables: dict[str, Any]) -> str:
        parts: list[str] = []
        num_chars = 0
        try:
            for part in chosen.template.generate(variables):
                num_chars += len(part)
                if num_chars > MAX_RENDERED_CHARS:
                    raise invalid(f"the rendered chat exceeds {MAX_RENDERED_CHARS} characters", "messages")
                parts.append(part)
        except (PenstockError, _Refused):
            raise
        except jinja2.exceptions.SecurityError as error:
            if chosen not in self._templates.values():
                raise invalid(f"chat_template does what the sandbox forbids: {error}", "chat_template") from error
            raise broken(f"the chat template of this model does what the sandbox forbids: {error}") from error
        # Whatever else goes wrong inside a template depends on the messages it was given: a missing key, None joined
        # to a string, a recursion without an end.
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError,
                RecursionError, OverflowError) as error:  # fmt: skip
            raise _UnrenderableError(f"{type(error).__name__}: {str(error)[:300]}") from error
        return "".join(parts)


def _forms(told: Conversation) -> Iterator[Conversation]:
    """The messages as most templates want them, and then as those do that fail over that.

    transformers leaves out a content that is null, and gives arguments of tool calls as objects; a template such as
    DeepSeek-R1's asks whether the content is none, and joins arguments to strings.
    """
    objects = with_objects(told)
    contents = [True] if all("content" in message for message in told) else [True, False]
    for messages in [objects] if objects == told else [objects, told]:
        for absent in contents:
            yield messages if absent else with_null_contents(messages)


def _continued_key(asked: object) -> str:
    """The key of the final message that is continued; empty: none is."""
    return asked if isinstance(asked, str) else "content" if asked else ""


def _mark_end(told: Conversation, key: str, source: str) -> str:
    """Mark where the final message ends; what is marked, a text."""
    message = told[-1]
    keys = [key]
    if key in REASONING_KEYS:
        keys = [name for name in REASONING_KEYS if message.get(name) == message.get(key)]
    text = message.get(key)
    if isinstance(text, list):  # of parts the last one goes on
        text = text[-1]["text"] if text else None
    if not isinstance(text, str) or not any(name in source for name in keys):
        raise invalid(
            f"continue_final_message needs a final message with a text as {key}, which the chat template writes",
            "continue_final_message",
        )
    for name in keys:
        if isinstance(message[name], list):
            message[name][-1]["text"] = text + _END
        else:
            message[name] = text + _END
    return text


def _cut_at_end(text: str, final: str) -> str:
    """`text` up to the end of the final message, so that the model goes on with that message."""
    end = text.rfind(_END.rstrip())
    if end < 0 or final.strip() not in text:
        raise invalid(
            "continue_final_message needs a final message that the chat template writes as it is",
            "continue_final_message",
        )
    # A template that trims its messages leaves out the blanks at the end; one that does not keeps them.
    return text[:end] if text.startswith(_END, end) else text[:end].rstrip()
