"""Protobuf to domain and back: stored requests in, tokenized prompts and rejections out."""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
from google.protobuf.message import DecodeError

from contract.domain.errors import ErrorCode, PenstockError, PoisonMessageError, invalid
from contract.domain.finish import RequestError
from contract.domain.plan import U32
from contract.domain.pooling import Pooling
from contract.domain.request import Header, Prompt, Request
from contract.domain.rows import unstarted_rows
from contract.domain.timeline import Computed
from contract.v1 import common_pb2, requests_pb2, tokenizer_pb2
from contract.wire import chat_facts, generation_defaults, pooling, requests
from contract.wire.tokens import encode_rows
from tokenizer_svc.core.tokenize import TokenizedPrompt

GenerateRequest = requests_pb2.GenerateRequest
num_samples = requests.num_samples
encode_defaults = generation_defaults.encode_defaults
encode_chat_facts = chat_facts.encode_chat_facts
encode_pooling_facts = pooling.encode_facts


def decode_header(payload: bytes) -> Header:
    """A penstock.v1.Header.

    Raises:
        PoisonMessageError: it is none.
    """
    try:
        message = common_pb2.Header.FromString(payload)
    except DecodeError as error:
        raise PoisonMessageError(f"the request's header is not a Header: {error}") from error
    return requests.decode_header(message)


def decode_body(payload: bytes, prompt: bytes) -> requests_pb2.GenerateRequest:
    """A penstock.v1.GenerateRequest, from one without its prompt and one that has the prompt alone.

    Raises:
        PoisonMessageError: one of them cannot be read.
    """
    try:
        message = requests_pb2.GenerateRequest.FromString(payload)
        message.MergeFromString(prompt)
    except DecodeError as error:
        raise PoisonMessageError(f"the request's body is not a GenerateRequest: {error}") from error
    return message


def num_chars(message: requests_pb2.GenerateRequest) -> int:
    """About how long a request's text is, in characters; 0 for token ids."""
    if message.HasField("messages"):
        chat = message.messages
        return len(chat.template_kwargs_json) + sum(
            len(m.content) + len(m.parts_json) + len(m.extra_json) for m in chat.messages
        )
    return len(message.text) + len(message.pair.first) + len(message.pair.second)


def decode_request(header: Header, message: requests_pb2.GenerateRequest) -> Request:
    """A checked request.

    Raises:
        PenstockError: INVALID_ARGUMENT naming the field that is to blame.
    """
    unsaid = frozenset(("max_tokens",) if message.stopping.max_tokens_is_default else ())
    return Request(
        header,
        message.model,
        _prompt(message),
        requests.decode_params(message),
        unsaid=unsaid,
        pooling=_pooling(message),
    )


def _pooling(message: requests_pb2.GenerateRequest) -> Pooling | None:
    try:
        return pooling.decode_pooling(message.pooling) if message.HasField("pooling") else None
    except PoisonMessageError as error:
        raise unreadable(str(error)) from error


def decode_prepare(call: tokenizer_pb2.PrepareCall) -> Request:
    """The request of a Prepare call: it is nobody's, and will not be computed.

    Raises:
        PenstockError: INVALID_ARGUMENT naming the field that is to blame.
    """
    try:
        _ = pooling.decode_pooling(call.request.pooling) if call.request.HasField("pooling") else None
    except PoisonMessageError as error:
        raise invalid(str(error), "pooling") from error
    return decode_request(Header(b"", "", 0, call.arrival_unix_ns, 0, "", 0), call.request)


def _prompt(message: requests_pb2.GenerateRequest) -> Prompt:
    match message.WhichOneof("prompt"):
        case "text":
            return Prompt(text=message.text)
        case "token_ids":
            return Prompt(token_ids=tuple(requests.unpack_u32("token_ids", message.token_ids.ids)))
        case "pair":
            return Prompt(pair=(message.pair.first, message.pair.second))
        case "messages":
            return chat_prompt(message.messages)
        case _:
            return Prompt()


def chat_prompt(chat: requests_pb2.ChatMessages) -> Prompt:
    """The prompt that chat messages are.

    Raises:
        PenstockError: INVALID_ARGUMENT: JSON that is none.
    """
    messages = tuple(requests.decode_message(f"messages[{index}]", each) for index, each in enumerate(chat.messages))
    kwargs = _json_object("chat_template_kwargs", chat.template_kwargs_json)
    required = tuple(chat.required_variables)
    return Prompt(messages=messages, chat_template_kwargs=kwargs, required_variables=required)


def _json_object(param: str, text: str) -> dict[str, Any] | None:
    if not text:
        return None
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise invalid(f"{param} must hold a JSON object: {error}", param) from error


def pack(values: U32 | Iterable[int]) -> bytes:
    """Token ids as packed little-endian u32."""
    return np.asarray(values if isinstance(values, np.ndarray) else list(values), "<u4").tobytes()


@lru_cache(1)
def _packed_once(token_ids: tuple[int, ...]) -> bytes:
    """Of ids that are the same with each prompt."""
    return pack(token_ids)


def encode_tokenized(prompt: TokenizedPrompt, *, tokenizing_ns: int = 0, tokenized_ns: int = 0) -> bytes:
    """A penstock.v1.TokenizedPrompt, with the Unix times at which the prompt had been read and tokenized."""
    message = tokenized_message(prompt, tokenizing_ns=tokenizing_ns, tokenized_ns=tokenized_ns)
    return message.SerializeToString()


def tokenized_message(
    prompt: TokenizedPrompt, *, tokenizing_ns: int = 0, tokenized_ns: int = 0
) -> requests_pb2.TokenizedPrompt:
    """The same, before it is bytes."""
    return requests_pb2.TokenizedPrompt(
        num_tokens=len(prompt.token_ids),
        eos_token_ids=_packed_once(prompt.eos_token_ids),
        max_tokens=prompt.stopping.max_tokens or 0,
        tokenizing_unix_ns=tokenizing_ns,
        tokenized_unix_ns=tokenized_ns,
        made=requests.encode_made(prompt.made),
        num_first_tokens=prompt.num_first_tokens,
    )


def encode_rejection(request_id: bytes, n: int, error: PenstockError, session: bytes, sent_ns: int) -> bytes:
    """A penstock.v1.TokenBatch that ends every sequence of a request before its first token."""
    rows = unstarted_rows(request_id, n, RequestError.of(error))
    return encode_rows(rows, session, Computed(sent_ns=sent_ns))


def decode_ids(call: tokenizer_pb2.DetokenizeCall | tokenizer_pb2.SpellCall) -> list[int]:
    """The token ids of a call.

    Raises:
        PenstockError: INVALID_ARGUMENT: not packed u32.
    """
    return requests.unpack_u32("token_ids", call.token_ids)


def spelled(tokens: Sequence[bytes]) -> tokenizer_pb2.SpellReply:
    """The bytes of tokens."""
    return tokenizer_pb2.SpellReply(byte_counts=pack(map(len, tokens)), token_bytes=b"".join(tokens))


def unreadable(why: str) -> PenstockError:
    """The error for the client of a request that cannot be read."""
    return PenstockError(ErrorCode.INTERNAL, f"the request was damaged on its way: {why}; send it again")
