"""Requests as they are stored."""

import hashlib
from collections.abc import Sequence
from functools import lru_cache

import msgspec
from google.protobuf.message import DecodeError

from contract.domain.params import SamplingParams
from contract.domain.request import Header, Prompt, Request
from contract.v1 import requests_pb2
from contract.wire import requests
from contract.wire.generation_defaults import clear_unsaid
from contract.wire.pooling import encode_pooling

_json = msgspec.json.Encoder()


def encode_header(header: Header) -> bytes:
    """A penstock.v1.Header."""
    return requests.encode_header(header).SerializeToString()


@lru_cache(64)
def _encode_params(params: SamplingParams, unsaid: frozenset[str]) -> bytes:
    """Those of most requests are the same."""
    message = requests.encode_params(params)
    message.stopping.max_tokens_is_default = "max_tokens" in unsaid
    return message.SerializeToString()


def count_prompt_tokens(meta: bytes) -> int:
    """Tokens of a prompt, from its penstock.v1.TokenizedPrompt; 0: it has none yet, or it cannot be read."""
    try:
        return requests_pb2.TokenizedPrompt.FromString(meta).num_tokens
    except DecodeError:  # the scheduler says so
        return 0


def encode_request(request: Request) -> bytes:
    """A penstock.v1.GenerateRequest without its prompt, with all that defaults have filled in."""
    # Messages one after the other are one message with the fields of both.
    return _encode_params(request.params, request.unsaid) + _encode_rest(request)


def asked_digest(several: Sequence[Request]) -> bytes:
    """A hash, 16 bytes, over what the requests of one call ask for, whatever defaults have filled in."""
    params = requests.encode_params(several[0].params)
    clear_unsaid(params, several[0].unsaid)
    digest = hashlib.blake2b(params.SerializeToString(deterministic=True), digest_size=16)
    for request in several:
        rest = _encode_rest(request) + encode_prompt(request.prompt)
        digest.update(b"%d:" % len(rest) + rest)
    return digest.digest()


def _encode_rest(request: Request) -> bytes:
    """All but the parameters and the prompt; but of a chat that it is one."""
    header = request.header
    message = requests_pb2.GenerateRequest(
        model=request.model,
        priority=header.priority,
        seed=header.seed,
        cache_salt=request.cache_salt,
        pooling=encode_pooling(request.pooling),
    )
    if request.prompt.messages is not None:
        message.messages.SetInParent()
    return message.SerializeToString()


def encode_prompt(prompt: Prompt) -> bytes:
    """A penstock.v1.GenerateRequest that has the prompt alone."""
    message = requests_pb2.GenerateRequest()
    if prompt.text is not None:
        message.text = prompt.text
    elif prompt.pair is not None:
        message.pair.first, message.pair.second = prompt.pair
    elif prompt.token_ids is not None:
        message.token_ids.ids = requests.pack_u32(prompt.token_ids)
    else:
        message.messages.SetInParent()
        message.messages.messages.extend(map(requests.encode_message, prompt.messages or ()))
        if prompt.chat_template_kwargs:
            message.messages.template_kwargs_json = _json.encode(prompt.chat_template_kwargs).decode()
        message.messages.required_variables.extend(prompt.required_variables)
    return message.SerializeToString()
