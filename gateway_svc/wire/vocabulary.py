"""Calls of a tokenizer's control service."""

from collections.abc import Awaitable, Callable, Iterable
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from grpc import aio

from contract.domain.errors import PenstockError
from contract.domain.request import Request
from contract.v1 import requests_pb2, tokenizer_pb2, tokenizer_pb2_grpc
from contract.wire.errors import ERROR_TRAILER, decode_error
from contract.wire.requests import pack_u32
from gateway_svc.core.vocabulary import Prepared, TokenIds, TokenizeAsk, Tokenized
from gateway_svc.wire.requests import encode_prompt, encode_request

Metadata: TypeAlias = tuple[tuple[str, str], ...]
# A tokenizer's method with its input: what is left to say is where, for how long, and who calls.
Question: TypeAlias = Callable[[aio.Channel, float, Metadata], Awaitable[Any]]


def tokenize_question(ask: TokenizeAsk, arrival_ns: int) -> Question:
    """The question for the tokens of a text or a chat; its answer is for `read_tokenized`."""
    if ask.prompt.messages is None:
        text = tokenizer_pb2.TokenizeCall(
            text=ask.prompt.text or "",
            add_special_tokens=ask.add_special_tokens,
            return_token_strs=ask.wants_strings,
        )
        return lambda channel, timeout_s, metadata: _stub(channel).Tokenize(text, timeout=timeout_s, metadata=metadata)
    chat = tokenizer_pb2.ApplyChatTemplateCall(
        messages=requests_pb2.GenerateRequest.FromString(encode_prompt(ask.prompt)).messages,
        add_special_tokens=ask.add_special_tokens,
        return_token_strs=ask.wants_strings,
        arrival_unix_ns=arrival_ns,
    )
    return lambda channel, timeout_s, metadata: _stub(channel).ApplyChatTemplate(
        chat, timeout=timeout_s, metadata=metadata
    )


def read_tokenized(
    reply: tokenizer_pb2.TokenizeReply | tokenizer_pb2.ApplyChatTemplateReply, *, with_strings: bool
) -> Tokenized:
    """The answer to `tokenize_question`."""
    return Tokenized(_token_ids(reply.token_ids), reply.max_model_len, list(reply.token_strs) if with_strings else None)


def detokenize_question(token_ids: Iterable[int]) -> Question:
    """The text of tokens, special ones included; it is answered by a message for `read_text`."""
    call = tokenizer_pb2.DetokenizeCall(token_ids=pack_u32(token_ids), skip_special_tokens=False)
    return lambda channel, timeout_s, metadata: _stub(channel).Detokenize(call, timeout=timeout_s, metadata=metadata)


def read_text(reply: tokenizer_pb2.DetokenizeReply) -> str:
    """The answer to `detokenize_question`."""
    return reply.text


def prepare_question(request: Request) -> Question:
    """The question for the tokens that a request would have computed; its answer is for `read_prepared`."""
    call = tokenizer_pb2.PrepareCall(arrival_unix_ns=request.header.arrival_ns)
    call.request.MergeFromString(encode_request(request))
    call.request.MergeFromString(encode_prompt(request.prompt))
    return lambda channel, timeout_s, metadata: _stub(channel).Prepare(call, timeout=timeout_s, metadata=metadata)


def read_prepared(reply: tokenizer_pb2.PrepareReply) -> Prepared:
    """The answer to `prepare_question`."""
    return Prepared(_token_ids(reply.token_ids), reply.prompt.max_tokens)


def spell_question(token_ids: TokenIds) -> Question:
    """The question for the bytes of tokens; its answer is for `read_spelled`."""
    call = tokenizer_pb2.SpellCall(token_ids=token_ids.astype("<u4", copy=False).tobytes())
    return lambda channel, timeout_s, metadata: _stub(channel).Spell(call, timeout=timeout_s, metadata=metadata)


def read_spelled(reply: tokenizer_pb2.SpellReply) -> list[bytes]:
    """The answer to `spell_question`."""
    ends = np.cumsum(np.frombuffer(reply.byte_counts, "<u4")).tolist()
    return [reply.token_bytes[start:end] for start, end in pairwise((0, *ends))]


def tokenizers_error(error: aio.AioRpcError) -> PenstockError | None:
    """The error that a tokenizer itself has told; None: it told none."""
    for key, value in error.trailing_metadata() or ():
        if key == ERROR_TRAILER and isinstance(value, bytes) and (told := decode_error(value)) is not None:
            return told
    return None


def _stub(channel: aio.Channel) -> "tokenizer_pb2_grpc.TokenizerAsyncStub":
    return tokenizer_pb2_grpc.TokenizerStub(channel)


def _token_ids(packed: bytes) -> TokenIds:
    return np.frombuffer(packed, "<u4")
