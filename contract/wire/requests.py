"""Values of the domain that more than one hop carries, as messages of the contract and back.

What one hop alone carries is in its two ends' own `wire`.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from typing import Any, TypeVar

import msgspec
import numpy as np

from contract.domain.errors import invalid
from contract.domain.params import Sampling, SamplingParams, Stopping, TextOptions
from contract.domain.request import Header, Message
from contract.v1 import common_pb2, requests_pb2

_SMALLEST = 1e-37  # a positive number that is still positive as a 32-bit float
_REMEMBERED = 64  # different parameters: those of most requests are the same, and to check them takes long
_MOST_BYTES = 4096  # of parameters that are remembered: a body may bring as much as it likes
_PART = 64 * 1024  # values that are packed in one call
J = TypeVar("J")
_FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


def pack_u32(values: Iterable[int]) -> bytes:
    """Four little-endian bytes for each value in [0, 2**32)."""
    # In parts, so that other threads run in between.
    rest = iter(values)
    parts = iter(lambda: np.fromiter(islice(rest, _PART), "<u4").tobytes(), b"")
    return b"".join(parts)


def unpack_u32(field: str, packed: bytes) -> list[int]:
    """The inverse of `pack_u32`.

    Raises:
        PenstockError: INVALID_ARGUMENT naming `field`: not four bytes for each value.
    """
    if len(packed) % 4:
        raise invalid(f"{field} must hold 4 bytes for each value, got {len(packed)} bytes", field)
    values: list[int] = np.frombuffer(packed, "<u4").tolist()
    return values


def encode_header(header: Header) -> common_pb2.Header:
    """What every message of a request carries."""
    return common_pb2.Header(
        request_id=header.request_id,
        tenant=header.tenant,
        priority=header.priority,
        arrival_unix_ns=header.arrival_ns,
        deadline_unix_ns=header.deadline_ns,
        traceparent=header.traceparent,
        seed=header.seed,
    )


def decode_header(message: common_pb2.Header) -> Header:
    """The inverse of `encode_header`."""
    return Header(
        request_id=message.request_id,
        tenant=message.tenant,
        priority=message.priority,
        arrival_ns=message.arrival_unix_ns,
        deadline_ns=message.deadline_unix_ns,
        traceparent=message.traceparent,
        seed=message.seed,
    )


def encode_params(params: SamplingParams) -> requests_pb2.GenerateRequest:
    """A request that has its parameters and nothing else: no prompt, model, priority or seed."""
    sampling, stopping, text = encode_sampling(params.sampling), params.stopping, params.text
    sampling.top_p = max(params.top_p, _SMALLEST)
    sampling.repetition_penalty = max(params.repetition_penalty, _SMALLEST)
    return requests_pb2.GenerateRequest(
        n=params.n,
        sampling=sampling,
        stopping=requests_pb2.StoppingParameters(
            max_tokens=stopping.max_tokens,
            min_tokens=stopping.min_tokens,
            stop_token_ids=pack_u32(stopping.stop_token_ids),
            ignore_eos=stopping.ignore_eos,
        ),
        text_options=requests_pb2.TextParameters(
            stop=text.stop,
            include_stop_str_in_output=text.include_stop_str_in_output,
            skip_special_tokens=text.skip_special_tokens,
        ),
    )


def decode_params(message: requests_pb2.GenerateRequest, seed: int | None = None) -> SamplingParams:
    """The checked parameters of a request, with this seed.

    Raises:
        PenstockError: INVALID_ARGUMENT naming the field that is out of bounds.
    """
    parts = [part.SerializeToString() for part in (message.sampling, message.stopping, message.text_options)]
    decode = _params if sum(map(len, parts)) <= _MOST_BYTES else _params.__wrapped__
    params = decode(num_samples(message), *parts)
    return params if seed is None else replace(params, seed=seed)


@lru_cache(_REMEMBERED)
def _params(n: int, sampling_part: bytes, stopping_part: bytes, text_part: bytes) -> SamplingParams:
    # Parts are not remembered by themselves: that would be before they are checked.
    sampling = _read_sampling(requests_pb2.SamplingParameters.FromString(sampling_part))
    stopping = _read_stopping(requests_pb2.StoppingParameters.FromString(stopping_part))
    text = decode_text_options(requests_pb2.TextParameters.FromString(text_part))
    return SamplingParams(
        n=n,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=dict(sampling.logit_bias),
        max_tokens=stopping.max_tokens,
        min_tokens=stopping.min_tokens,
        stop=text.stop,
        stop_token_ids=stopping.stop_token_ids,
        ignore_eos=stopping.ignore_eos,
        logprobs=sampling.num_logprobs,
        skip_special_tokens=text.skip_special_tokens,
        include_stop_str_in_output=text.include_stop_str_in_output,
        suppress_tokens=sampling.suppress_tokens,
    )


def num_samples(message: requests_pb2.GenerateRequest) -> int:
    """How many samples a request asks for; not checked."""
    return message.n if message.HasField("n") else 1


def encode_sampling(sampling: Sampling) -> requests_pb2.SamplingParameters:
    """The worker's part of the parameters."""
    return requests_pb2.SamplingParameters(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias_ids=pack_u32(token_id for token_id, _ in sampling.logit_bias),
        logit_bias_values=np.array([bias for _, bias in sampling.logit_bias], "<f4").tobytes(),
        num_logprobs=sampling.num_logprobs,
        suppress_token_ids=pack_u32(sampling.suppress_tokens),
    )


def decode_sampling(message: requests_pb2.SamplingParameters) -> Sampling:
    """The inverse of `encode_sampling`, of parameters that have been checked; a field that is absent has its default.

    Raises:
        PenstockError: INVALID_ARGUMENT: the columns of the logit bias do not fit together.
    """
    return _sampling(message.SerializeToString())


@lru_cache(_REMEMBERED)
def _sampling(payload: bytes) -> Sampling:
    return _read_sampling(requests_pb2.SamplingParameters.FromString(payload))


def _read_sampling(message: requests_pb2.SamplingParameters) -> Sampling:
    ids = unpack_u32("sampling.logit_bias_ids", message.logit_bias_ids)
    if len(message.logit_bias_values) != 4 * len(ids):
        raise invalid("logit_bias_values must have a value for each of logit_bias_ids", "logit_bias_values")
    biases: list[float] = np.frombuffer(message.logit_bias_values, "<f4").tolist()
    return Sampling(
        top_k=message.top_k,
        logit_bias=tuple(zip(ids, biases, strict=True)),
        num_logprobs=message.num_logprobs if message.HasField("num_logprobs") else None,
        suppress_tokens=tuple(unpack_u32("sampling.suppress_token_ids", message.suppress_token_ids)),
        **{field.name: value for field, value in message.ListFields() if field.name in _FLOATS},
    )


def decode_stopping(message: requests_pb2.StoppingParameters) -> Stopping:
    """The scheduler's part of parameters that have been checked.

    Raises:
        PenstockError: INVALID_ARGUMENT: the stop ids are no column.
    """
    return _stopping(message.SerializeToString())


@lru_cache(_REMEMBERED)
def _stopping(payload: bytes) -> Stopping:
    return _read_stopping(requests_pb2.StoppingParameters.FromString(payload))


def _read_stopping(message: requests_pb2.StoppingParameters) -> Stopping:
    return Stopping(
        max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
        min_tokens=message.min_tokens,
        stop_token_ids=tuple(unpack_u32("stopping.stop_token_ids", message.stop_token_ids)),
        ignore_eos=message.ignore_eos,
    )


def decode_text_options(message: requests_pb2.TextParameters) -> TextOptions:
    """The detokenizer's part of the parameters."""
    return TextOptions(
        stop=tuple(message.stop),
        include_stop_str_in_output=message.include_stop_str_in_output,
        skip_special_tokens=message.skip_special_tokens if message.HasField("skip_special_tokens") else True,
    )


def encode_message(message: Message) -> requests_pb2.ChatMessage:
    """A chat message; what it has beside role and text goes as JSON."""
    extra = msgspec.json.encode(message.extra).decode() if message.extra else ""
    encoded = requests_pb2.ChatMessage(role=message.role, extra_json=extra)
    if isinstance(message.content, str):
        encoded.content = message.content
    elif message.content is not None:
        encoded.parts_json = msgspec.json.encode(message.content).decode()
    return encoded


def decode_message(where: str, message: requests_pb2.ChatMessage) -> Message:
    """The inverse of `encode_message`; `where` is what it is called in errors.

    Raises:
        PenstockError: INVALID_ARGUMENT: JSON that is none, or not of the form that it must have.
    """
    extra = _read_json(f"{where}.extra_json", message.extra_json, dict[str, Any]) if message.extra_json else None
    if message.parts_json:
        parts = _read_json(f"{where}.parts_json", message.parts_json, list[dict[str, Any]])
        for index, part in enumerate(parts):
            if part.get("type") != "text" or not isinstance(part.get("text"), str):
                name = f"{where}.parts_json[{index}]"
                raise invalid(f"{name} must be an object with the type 'text' and a text", name)
        return Message(message.role, tuple(parts), extra)
    return Message(message.role, message.content if message.HasField("content") or not extra else None, extra)


def _read_json(where: str, text: str, kind: type[J]) -> J:
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise invalid(f"{where} cannot be read as JSON: {error}", where) from error
