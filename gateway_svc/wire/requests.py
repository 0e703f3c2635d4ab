"""Requests as they are stored."""

from functools import lru_cache

import msgspec
from google.protobuf.message import DecodeError

from penstock.domain.params import SamplingParams
from penstock.domain.request import Header, Request
from penstock.v1 import requests_pb2
from penstock.wire import requests

_json = msgspec.json.Encoder()


def encode_header(header: Header) -> bytes:
    """A penstock.v1.Header."""
    return requests.encode_header(header).SerializeToString()


@lru_cache(64)
def _encode_params(params: SamplingParams) -> bytes:
    """Those of most requests are the same."""
    return requests.encode_params(params).SerializeToString()


def count_prompt_tokens(meta: bytes) -> int:
    """Tokens of a prompt, from its penstock.v1.TokenizedPrompt; 0: it has none yet, or it cannot be read."""
    try:
        return len(requests_pb2.TokenizedPrompt.FromString(meta).token_ids) // 4
    except DecodeError:  # the scheduler says so
        return 0


def encode_request(request: Request) -> bytes:
    """A penstock.v1.GenerateRequest."""
    header = request.header
    message = requests_pb2.GenerateRequest(
        model=request.model, priority=header.priority, seed=header.seed, cache_salt=request.cache_salt
    )
    prompt = request.prompt
    if prompt.text is not None:
        message.text = prompt.text
    elif prompt.token_ids is not None:
        message.token_ids.ids = requests.pack_u32(prompt.token_ids)
    else:
        message.messages.SetInParent()
        message.messages.messages.extend(map(requests.encode_message, prompt.messages or ()))
        if prompt.chat_template_kwargs:
            message.messages.template_kwargs_json = _json.encode(prompt.chat_template_kwargs).decode()
    # Messages one behind the other are one message with the fields of both.
    return _encode_params(request.params) + message.SerializeToString()
