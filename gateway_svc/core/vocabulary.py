"""Calls that need a vocabulary and no model, in vLLM's words: JSON in, what to ask a tokenizer out, and its answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from contract.domain.errors import PenstockError, invalid
from contract.domain.params import PARAMETERS
from contract.domain.request import Prompt, Request
from gateway_svc.core.ask import Ask
from gateway_svc.core.bodies import body_fields, decode_body, decode_messages
from gateway_svc.core.field_names import FieldName, FieldNames
from gateway_svc.core.messages import check_depth, parse_messages
from gateway_svc.core.replies import encode
from gateway_svc.core.template_fields import required_variables, template_kwargs
from gateway_svc.core.unsupported import check_fields, unknown_field

_U32 = 2**32
TokenIds = NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class TokenizeAsk:
    """A text to be tokenized, or a chat that the model's template makes a text of."""

    model: str  # empty: the one that is served
    prompt: Prompt
    add_special_tokens: bool  # the tokenizer's own, beside those that a template writes
    wants_strings: bool  # of each token
    ignored_fields: tuple[str, ...] = ()
    names: FieldNames = ()  # that the caller has for fields of tokenizers, where they are others


@dataclass(frozen=True, slots=True)
class DetokenizeAsk:
    """Tokens whose text is asked for."""

    model: str  # empty: the one that is served
    token_ids: tuple[int, ...]
    ignored_fields: tuple[str, ...] = ()
    names: FieldNames = ()  # that the caller has for fields of tokenizers, where they are others


@dataclass(frozen=True, slots=True)
class Tokenized:
    """Tokens of a text or a chat."""

    token_ids: TokenIds
    max_model_len: int  # tokens of prompt and output together
    strings: Sequence[str] | None = None  # of each token, as the vocabulary spells it


@dataclass(frozen=True, slots=True)
class Prepared:
    """The tokens that a request would have computed."""

    token_ids: TokenIds
    max_tokens: int  # of output, at most


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `POST /tokenize`: exactly one of `prompt` and `messages`. Null means the default."""

    model: str | None = None
    prompt: str | None = None
    messages: list[msgspec.Raw] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `POST /detokenize`."""

    model: str | None = None
    tokens: list[int] | None = None


_tokenize = msgspec.json.Decoder(TokenizeBody)
_detokenize = msgspec.json.Decoder(DetokenizeBody)
TOKENIZE_FIELDS = frozenset(TokenizeBody.__struct_fields__)
DETOKENIZE_FIELDS = frozenset(DetokenizeBody.__struct_fields__)
_OF_CHATS = (  # and of nothing else
    *("tools", "chat_template_kwargs", "chat_template", "add_generation_prompt", "continue_final_message"),
    *("documents", "reasoning_effort"),
)


def parse_tokenize(body: bytes) -> TokenizeAsk:
    """The body of `POST /tokenize`.

    Raises:
        PenstockError: INVALID_ARGUMENT or UNIMPLEMENTED, naming the field.
    """
    ignored = check_fields("tokenize", body_fields(body), TOKENIZE_FIELDS)
    raw = decode_body(_tokenize, body)
    if (raw.prompt is None) == (raw.messages is None):
        raise invalid("give either prompt or messages", "prompt")
    if raw.messages is None and (wrong := [name for name in _OF_CHATS if getattr(raw, name) is not None]):
        raise invalid(f"{wrong[0]} is for the chat template, and only messages have one", wrong[0])
    prompt = Prompt(text=raw.prompt) if raw.messages is None else _chat(raw, raw.messages)
    return TokenizeAsk(
        model=raw.model or "",
        prompt=prompt,
        add_special_tokens=raw.messages is None if raw.add_special_tokens is None else raw.add_special_tokens,
        wants_strings=bool(raw.return_token_strs),
        ignored_fields=ignored,
        names=(FieldName("text", "prompt"),),
    )


def parse_detokenize(body: bytes) -> DetokenizeAsk:
    """The body of `POST /detokenize`.

    Raises:
        PenstockError: INVALID_ARGUMENT or UNIMPLEMENTED, naming the field.
    """
    ignored = check_fields("detokenize", body_fields(body), DETOKENIZE_FIELDS)
    raw = decode_body(_detokenize, body)
    if raw.tokens is None:
        raise invalid("tokens is missing: a list of token ids", "tokens")
    wrong = next((each for each in raw.tokens if not 0 <= each < _U32), None)
    if wrong is not None:
        raise invalid(f"token ids must be in [0, {_U32 - 1}], got {wrong}", "tokens")
    return DetokenizeAsk(raw.model or "", tuple(raw.tokens), ignored, (FieldName("token_ids", "tokens"),))


def refused_vocabulary_field(ask: TokenizeAsk | DetokenizeAsk) -> PenstockError | None:
    """The error of a call with fields that nobody knows, where such are refused; None: it has none."""
    if not ask.ignored_fields:
        return None
    is_tokenize = isinstance(ask, TokenizeAsk)
    known = TOKENIZE_FIELDS if is_tokenize else DETOKENIZE_FIELDS
    return unknown_field("tokenize" if is_tokenize else "detokenize", ask.ignored_fields[0], known)


def tokenize_reply(found: Tokenized) -> bytes:
    """The body of the answer of `POST /tokenize`."""
    return encode(
        {
            "count": len(found.token_ids),
            "max_model_len": found.max_model_len,
            "tokens": found.token_ids.tolist(),
            "token_strs": found.strings,
        }
    )


def detokenize_reply(text: str) -> bytes:
    """The body of the answer of `POST /detokenize`."""
    return encode({"prompt": text})


def render_reply(ask: Ask, request: Request, prepared: Prepared, shown_id: str) -> bytes:
    """The body of the answer of `POST /v1/chat/completions/render`: what vLLM's `/inference/v1/generate` takes.

    `shown_id`: what the request is called, without OpenAI's prefix.
    """
    params = {name: getattr(request.params, name) for name in PARAMETERS} | {"max_tokens": prepared.max_tokens}
    options = {"include_usage": ask.include_usage, "continuous_usage_stats": ask.continuous_usage}
    return encode(
        {
            "request_id": ask.form.id_prefix + shown_id,
            "token_ids": prepared.token_ids.tolist(),
            "token_offsets": None,
            "features": None,
            "sampling_params": params,
            "model": request.model,
            "stream": ask.stream,
            "stream_options": options if ask.stream else None,
            "cache_salt": ask.cache_salt or None,
            "priority": ask.priority,
        }
    )


def _chat(raw: TokenizeBody, messages: list[msgspec.Raw]) -> Prompt:
    check_depth("tools", {"tools": raw.tools})
    kwargs = template_kwargs(raw) or {}
    if raw.tools and kwargs.setdefault("tools", raw.tools) != raw.tools:
        raise invalid("tools and chat_template_kwargs.tools contradict each other", "tools")
    return Prompt(
        messages=parse_messages(decode_messages(messages)),
        chat_template_kwargs=kwargs or None,
        required_variables=required_variables(raw),
    )
