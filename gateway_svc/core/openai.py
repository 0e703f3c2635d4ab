"""OpenAI's request bodies, with vLLM's further sampling fields: JSON in, what to generate and how to answer out."""

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import lru_cache
from typing import Any, TypeAlias, TypeVar, cast

import msgspec

from contract.domain.errors import invalid, unimplemented
from contract.domain.generation_defaults import FILLED, OPENAI_DEFAULTS, GenerationDefaults
from contract.domain.params import MAX_LOGPROBS, PARAMETERS, SamplingParams
from contract.domain.repetition import read_repetition
from contract.domain.request import Prompt, check_cache_salt
from gateway_svc.core.ask import Ask, DefaultsOf, Form
from gateway_svc.core.bodies import body_fields, check_priority, decode_body, decode_messages
from gateway_svc.core.chat_outputs import chat_output
from gateway_svc.core.field_names import FieldName, FieldNames, in_words_of
from gateway_svc.core.formats.choice import NO_FORMATS, ModelFormats
from gateway_svc.core.messages import parse_messages
from gateway_svc.core.prompts import parse_prompts
from gateway_svc.core.structured_outputs import FormFields, form_field, read_form
from gateway_svc.core.template_fields import required_variables, template_kwargs
from gateway_svc.core.tools import ToolFields
from gateway_svc.core.unsupported import check_fields

MAX_CHOICES = 1024  # prompts times n in one call
MAX_STREAM_INTERVAL = 1024  # tokens that are held back at most
DEFAULT_MAX_TOKENS = 16  # of a completion, as OpenAI has it; a chat goes on until the context is full

FormatsOf: TypeAlias = Callable[[str], ModelFormats]  # of a model, by the name that a body has for it


class _StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _Body(FormFields, frozen=True, kw_only=True):
    """The fields of both calls beside parameters. Null means the default, as OpenAI's clients send it."""

    model: str | None = None
    priority: int | None = None
    user: str | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    add_special_tokens: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    resumable: bool | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    stream_interval: int | None = None
    return_token_ids: bool | None = None
    echo: bool | None = None
    spaces_between_special_tokens: bool | None = None
    prompt_logprobs: int | None = None


class _CompletionBody(_Body, frozen=True, kw_only=True):
    prompt: str | list[str | int | list[int]] | None = None
    max_tokens: int | None = None
    logprobs: int | None = None


class ChatBody(_Body, frozen=True, kw_only=True):
    """The fields of a chat beside parameters that it does not spell in a way of its own; `CHAT_BODY` has these too."""

    messages: list[msgspec.Raw] | None = None  # each is read by itself: all in one would let no thread run meanwhile
    max_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None


B = TypeVar("B", bound=msgspec.Struct)


def with_parameters(body: type[B], without: Collection[str] = ()) -> type[B]:
    """A body that has the parameters too, but for those that it declares by itself or does without."""
    left_out = {*body.__struct_fields__, *without}
    fields = [(name, each.kind.json | None, None) for name, each in PARAMETERS.items() if name not in left_out]
    return cast(type[B], msgspec.defstruct(body.__name__, fields, bases=(body,), frozen=True, kw_only=True))


_remembered = lru_cache(64)(SamplingParams)  # those of most requests are the same, and to check them takes long

COMPLETION_BODY, CHAT_BODY = with_parameters(_CompletionBody), with_parameters(ChatBody)
_completion = msgspec.json.Decoder(COMPLETION_BODY)
_chat = msgspec.json.Decoder(CHAT_BODY)
_OPTIONS = frozenset(f"stream_options.{name}" for name in _StreamOptions.__struct_fields__)
COMPLETION_FIELDS = frozenset(COMPLETION_BODY.__struct_fields__) | _OPTIONS
CHAT_FIELDS = frozenset(CHAT_BODY.__struct_fields__) | _OPTIONS


def parse_completion(body: bytes, defaults: DefaultsOf = lambda _: OPENAI_DEFAULTS) -> Ask:
    """The body of `POST /v1/completions`, where it says nothing with these defaults of its model.

    Raises:
        PenstockError: INVALID_ARGUMENT or UNIMPLEMENTED, naming the field; what `defaults` raises.
    """
    ignored = check_fields("completion", body_fields(body), COMPLETION_FIELDS)
    raw = decode_body(_completion, body)
    if raw.add_special_tokens is False:
        raise invalid("add_special_tokens cannot be false: give token ids to decide about special tokens yourself")
    # As vLLM has it: the prompt is computed, which gives a token, and that is not told.
    without_output = bool(raw.echo) and raw.max_tokens == 0
    max_tokens = 1 if without_output else raw.max_tokens
    names = _form_names(raw)
    with in_words_of(names):
        params, unsaid = _params(raw, max_tokens, DEFAULT_MAX_TOKENS, raw.logprobs, defaults(raw.model or ""))
    if without_output and params.logprob_token_ids:
        raise invalid(
            "logprob_token_ids is for output tokens, and with max_tokens 0 there are none", "logprob_token_ids"
        )
    if raw.echo and raw.prompt_logprobs is None:
        names = (*names, FieldName("prompt_logprobs", "logprobs"))
        with in_words_of(names):
            params = replace(params, prompt_logprobs=raw.logprobs)
    prompts = parse_prompts(raw.prompt, "prompt", MAX_CHOICES)
    ask = _ask(Form.COMPLETION, raw, prompts, params, unsaid=unsaid, names=names)
    return replace(ask, echo=bool(raw.echo), without_output=without_output, ignored_fields=ignored)


def parse_chat(
    body: bytes,
    defaults: DefaultsOf = lambda _: OPENAI_DEFAULTS,
    formats: FormatsOf = lambda _: NO_FORMATS,
) -> Ask:
    """The body of `POST /v1/chat/completions`, where it says nothing with these defaults of its model, whose outputs
    have these formats.

    Raises:
        PenstockError: INVALID_ARGUMENT or UNIMPLEMENTED, naming the field; what `defaults` raises.
    """
    ignored = check_fields("chat", body_fields(body), CHAT_FIELDS)
    raw = decode_body(_chat, body)
    if raw.messages is None:
        raise invalid("messages is missing", "messages")
    return replace(ask_chat(raw, decode_messages(raw.messages), defaults, formats), ignored_fields=ignored)


def ask_chat(raw: ChatBody, messages: list[dict[str, Any]], defaults: DefaultsOf, formats: FormatsOf) -> Ask:
    """A chat by the fields of its body and its messages, whichever API has other words for them.

    Raises:
        PenstockError: INVALID_ARGUMENT or UNIMPLEMENTED, naming the field; what `defaults` raises.
    """
    if raw.echo:
        raise unimplemented("echo", "echo of a chat")
    if raw.add_special_tokens:
        raise invalid("add_special_tokens cannot be true: the chat template writes them", "add_special_tokens")
    names = _chat_names(raw)
    with in_words_of(names):
        return _ask_chat(raw, messages, defaults, formats, names)


def _ask_chat(
    raw: ChatBody, messages: list[dict[str, Any]], defaults: DefaultsOf, formats: FormatsOf, names: FieldNames
) -> Ask:
    kwargs = template_kwargs(raw) or {}
    max_tokens = raw.max_tokens if raw.max_completion_tokens is None else raw.max_completion_tokens
    params, unsaid = _params(raw, max_tokens, None, _num_chat_logprobs(raw), defaults(raw.model or ""))
    tools = ToolFields(raw.tools, raw.tool_choice, raw.parallel_tool_calls, raw.include_reasoning)
    output = chat_output(tools, params, kwargs, formats(raw.model or ""))
    prompt = Prompt(
        messages=parse_messages(messages),
        chat_template_kwargs={**kwargs, **output.variables} or None,
        required_variables=(*required_variables(raw), *output.variables),
    )
    return replace(_ask(Form.CHAT, raw, (prompt,), output.params, unsaid=unsaid, names=names), reading=output.reading)


def _ask(
    form: Form,
    raw: _Body,
    prompts: tuple[Prompt, ...],
    params: SamplingParams,
    *,
    unsaid: frozenset[str],
    names: FieldNames,
) -> Ask:
    options = raw.stream_options
    if options is not None and not raw.stream:
        raise invalid("stream_options is only allowed with stream=true", "stream_options")
    if len(prompts) * params.n > MAX_CHOICES:
        raise invalid(f"prompts times n may be at most {MAX_CHOICES}, got {len(prompts)} times {params.n}", "n")
    # As vLLM has it: usage in every chunk, and at the end unless `include_usage` is false; then there is none at all.
    continuous_usage = bool(options and options.continuous_usage_stats)
    include_usage = continuous_usage
    if options is not None and options.include_usage is not None:
        include_usage = options.include_usage
    interval = raw.stream_interval
    if interval is not None and not 1 <= interval <= MAX_STREAM_INTERVAL:
        raise invalid(f"stream_interval must be in [1, {MAX_STREAM_INTERVAL}], got {interval}", "stream_interval")
    if raw.spaces_between_special_tokens is False and not params.skip_special_tokens:
        raise unimplemented("spaces_between_special_tokens", "text of special tokens without spaces between them")
    return Ask(
        form=form,
        model=raw.model or "",
        prompts=prompts,
        params=params,
        priority=check_priority(raw.priority),
        stream=bool(raw.stream),
        include_usage=include_usage,
        continuous_usage=include_usage and continuous_usage,
        tokens_as_ids=bool(raw.return_tokens_as_token_ids),
        is_resumable=bool(raw.resumable),
        stream_interval=interval or 0,
        returns_token_ids=bool(raw.return_token_ids),
        wants_prompt_logprobs=raw.prompt_logprobs is not None,
        cache_salt="" if raw.cache_salt is None else check_cache_salt(raw.cache_salt),
        client_id=raw.request_id,
        unsaid=unsaid,
        names=names,
    )


def _form_names(raw: _Body) -> FieldNames:
    """The name of the field that says the form of the output, where it is not `structured_outputs`."""
    name = form_field(raw)
    return () if name is None else (FieldName("structured_outputs", name, is_whole=True),)


def _chat_names(raw: ChatBody) -> FieldNames:
    names = _form_names(raw)
    return names if raw.max_completion_tokens is None else (*names, FieldName("max_tokens", "max_completion_tokens"))


def _params(
    raw: _Body, max_tokens: int | None, most: int | None, num_logprobs: int | None, defaults: GenerationDefaults
) -> tuple[SamplingParams, frozenset[str]]:
    """The parameters of a body, and the names of those that it leaves to the defaults.

    Args:
        raw: the body.
        max_tokens: as it says; None: it does not.
        most: what holds then, if the model's makers say nothing.
        num_logprobs: as it says.
        defaults: those of the model.
    """
    said = {name: getattr(raw, name) for name in PARAMETERS} | {"max_tokens": max_tokens, "logprobs": num_logprobs}
    said["structured_outputs"] = read_form(raw, said["structured_outputs"])
    if (repetition := said["repetition_detection"]) is not None:
        said["repetition_detection"] = read_repetition(repetition)
    said = {
        name: tuple(value) if isinstance(value, list) else value for name, value in said.items() if value is not None
    }
    biases = _logit_bias(said.pop("logit_bias", {}))
    filled = defaults.beside_beams if said.get("use_beam_search") else defaults.stated
    params = _remembered(**{"max_tokens": most, **filled, **said})
    return (replace(params, logit_bias=biases) if biases else params), frozenset(FILLED.keys() - said.keys())


def _logit_bias(raw: dict[str, float]) -> dict[int, float]:
    """OpenAI's form: token ids as strings."""
    biases = {}
    for key, bias in raw.items():
        if not (key.isascii() and key.isdigit()):
            raise invalid(f"a key of logit_bias must be a token id in decimal, got {key!r:.40}", "logit_bias")
        biases[int(key[:20])] = bias
    return biases


def _num_chat_logprobs(raw: ChatBody) -> int | None:
    if not raw.logprobs:
        if raw.top_logprobs:
            raise invalid("top_logprobs is only allowed with logprobs=true", "top_logprobs")
        return None
    num_top = raw.top_logprobs or 0
    if not 0 <= num_top <= MAX_LOGPROBS:
        raise invalid(f"top_logprobs must be an integer in [0, {MAX_LOGPROBS}], got {num_top}", "top_logprobs")
    return num_top
