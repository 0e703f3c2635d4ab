"""Requests as they are stored."""

import msgspec

from penstock.domain.request import Header, Request
from penstock.wire import requests

_json = msgspec.json.Encoder()


def encode_header(header: Header) -> bytes:
    """A penstock.v1.Header."""
    return requests.encode_header(header).SerializeToString()


def encode_request(request: Request) -> bytes:
    """A penstock.v1.GenerateRequest."""
    message = requests.encode_params(request.params)
    message.model = request.model
    message.priority = request.header.priority
    message.seed = request.header.seed
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
    return message.SerializeToString()
