"""Requests as they are stored."""

import msgspec
import numpy as np

from gateway_svc.wire.columns import u32
from penstock.domain.request import Header, Request
from penstock.v1 import common_pb2, requests_pb2

_SMALLEST = 1e-37  # of the positive numbers that a float field keeps positive
_json = msgspec.json.Encoder()


def encode_header(header: Header) -> bytes:
    """A penstock.v1.Header."""
    return common_pb2.Header(
        request_id=header.request_id,
        tenant=header.tenant,
        priority=header.priority,
        arrival_unix_ns=header.arrival_ns,
        deadline_unix_ns=header.deadline_ns,
        traceparent=header.traceparent,
        seed=header.seed,
    ).SerializeToString()


def encode_request(request: Request) -> bytes:
    """A penstock.v1.GenerateRequest."""
    params = request.params
    sampling, stopping, text = params.sampling, params.stopping, params.text
    message = requests_pb2.GenerateRequest(
        model=request.model,
        n=params.n,
        sampling=requests_pb2.SamplingParameters(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=max(sampling.top_p, _SMALLEST),
            min_p=sampling.min_p,
            repetition_penalty=max(sampling.repetition_penalty, _SMALLEST),
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            logit_bias_ids=u32(token_id for token_id, _ in sampling.logit_bias),
            logit_bias_values=np.array([bias for _, bias in sampling.logit_bias], "<f4").tobytes(),
            num_logprobs=sampling.num_logprobs,
        ),
        stopping=requests_pb2.StoppingParameters(
            max_tokens=stopping.max_tokens,
            min_tokens=stopping.min_tokens,
            stop_token_ids=u32(stopping.stop_token_ids),
            ignore_eos=stopping.ignore_eos,
        ),
        text_options=requests_pb2.TextParameters(
            stop=text.stop,
            include_stop_str_in_output=text.include_stop_str_in_output,
            skip_special_tokens=text.skip_special_tokens,
        ),
        priority=request.header.priority,
        seed=request.header.seed,
    )
    prompt = request.prompt
    if prompt.text is not None:
        message.text = prompt.text
    elif prompt.token_ids is not None:
        message.token_ids.ids = u32(prompt.token_ids)
    else:
        message.messages.SetInParent()
        for each in prompt.messages or ():
            extra = _json.encode(each.extra).decode() if each.extra else ""
            message.messages.messages.add(role=each.role, content=each.content, extra_json=extra)
        if prompt.chat_template_kwargs:
            message.messages.template_kwargs_json = _json.encode(prompt.chat_template_kwargs).decode()
    return message.SerializeToString()
