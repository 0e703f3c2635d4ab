"""Values of the domain that more than one hop carries, as messages of the contract and back.

What one hop alone carries is in its two ends' own `wire`.
"""

from collections.abc import Iterable
from dataclasses import asdict, fields, replace
from functools import lru_cache
from itertools import chain, islice
from typing import Any, TypeVar

import msgspec
import numpy as np
from google.protobuf.message import Message as ProtobufMessage

from contract.domain.errors import invalid
from contract.domain.parameter import Biases, Parameter, Part, Strings, TokenIds
from contract.domain.params import PARTS, Made, Sampling, SamplingParams, Stopping, TextOptions
from contract.domain.repetition import Repetition, RepetitionDetectionParams
from contract.domain.request import Header, Message
from contract.domain.structured_outputs import FORMS, StructuredOutputsParams
from contract.v1 import common_pb2, requests_pb2
from contract.wire.beams import decode_beams, encode_beams

_SMALLEST = 1e-37  # a positive number that is still positive as a 32-bit float
_REMEMBERED = 64  # different parameters: those of most requests are the same, and to check them takes long
_MOST_BYTES = 4096  # of parameters that are remembered: a body may bring as much as it likes
_REQUEST_TEXTS = [each.name for each in PARTS[Part.REQUEST] if isinstance(each.kind, Strings)]
_AT_END = "right"  # the side of a prompt, as vLLM calls it
_PART = 64 * 1024  # values that are packed in one call
J = TypeVar("J")


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
    """The header of every message of a request."""
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
    texts: dict[str, Any] = {name: getattr(params, name) or () for name in _REQUEST_TEXTS}
    sampling = encode_sampling(params.sampling)
    sampling.top_p = max(params.top_p, _SMALLEST)
    sampling.repetition_penalty = max(params.repetition_penalty, _SMALLEST)
    return requests_pb2.GenerateRequest(
        n=params.n,
        **texts,
        structured_outputs=encode_structured_outputs(params.structured_outputs),
        beams=encode_beams(params.beams),
        truncate_prompt_tokens=params.truncate_prompt_tokens,
        truncates_at_end=params.truncation_side == _AT_END,
        sampling=sampling,
        stopping=requests_pb2.StoppingParameters(**_encode_part(Part.STOPPING, params.stopping)),
        text_options=requests_pb2.TextParameters(**_encode_part(Part.TEXT, params.text)),
    )


def decode_params(message: requests_pb2.GenerateRequest, seed: int | None = None) -> SamplingParams:
    """The checked parameters of a request, with this seed.

    Raises:
        PenstockError: INVALID_ARGUMENT naming the field that is out of bounds.
    """
    parts = [part.SerializeToString() for part in (message.sampling, message.stopping, message.text_options)]
    texts = tuple(tuple(getattr(message, name)) for name in _REQUEST_TEXTS)
    decode = _params if sum(map(len, (*parts, *chain.from_iterable(texts)))) <= _MOST_BYTES else _params.__wrapped__
    params = decode(num_samples(message), texts, *parts)
    if message.HasField("truncate_prompt_tokens"):
        params = replace(params, truncate_prompt_tokens=message.truncate_prompt_tokens)
    if message.truncates_at_end:
        params = replace(params, truncation_side=_AT_END)
    if message.HasField("structured_outputs"):
        params = replace(params, structured_outputs=_decode_structured_outputs(message.structured_outputs))
    if message.HasField("beams"):
        search = decode_beams(message.beams)
        params = replace(
            params,
            use_beam_search=True,
            length_penalty=search.length_penalty,
            early_stopping=search.early_stopping,
        )
    return params if seed is None else replace(params, seed=seed)


@lru_cache(_REMEMBERED)
def _params(
    n: int, texts: tuple[tuple[str, ...], ...], sampling_part: bytes, stopping_part: bytes, text_part: bytes
) -> SamplingParams:
    # Parts are not remembered by themselves: that would be before they are checked.
    parts = {
        Part.SAMPLING: _read_sampling(requests_pb2.SamplingParameters.FromString(sampling_part)),
        Part.STOPPING: _read_stopping(requests_pb2.StoppingParameters.FromString(stopping_part)),
        Part.TEXT: decode_text_options(requests_pb2.TextParameters.FromString(text_part)),
    }
    values = {each.name: getattr(read, each.field) for part, read in parts.items() for each in PARTS[part]}
    values |= {"logit_bias": dict(values["logit_bias"]), **dict(zip(_REQUEST_TEXTS, texts, strict=True))}
    return SamplingParams(n=n, **values)


def num_samples(message: requests_pb2.GenerateRequest) -> int:
    """The number of samples that a request asks for; not checked."""
    return message.n if message.HasField("n") else 1


def encode_sampling(sampling: Sampling) -> requests_pb2.SamplingParameters:
    """The worker's part of the parameters."""
    return requests_pb2.SamplingParameters(**_encode_part(Part.SAMPLING, sampling), **_made_fields(sampling))


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
    made = {each.name: _read_made(each.name, getattr(message, each.name)) for each in fields(Made)}
    return Sampling(**_decode_part(Part.SAMPLING, message), **made)


def encode_made(made: Made) -> requests_pb2.SamplingParameters:
    """The fields that a tokenizer made, without other parameters: to be merged into those of its request."""
    return requests_pb2.SamplingParameters(**_made_fields(made))


def _made_fields(made: Made) -> dict[str, Any]:
    return {each.name: _write_made(getattr(made, each.name)) for each in fields(Made)}


def _write_made(value: str | tuple[Any, ...]) -> Any:
    """A text, token ids, or token sequences."""
    if isinstance(value, str):
        return value
    if value and isinstance(value[0], tuple):
        return [requests_pb2.TokenIds(ids=pack_u32(sequence)) for sequence in value]
    return pack_u32(value) if value else None


def _read_made(name: str, said: Any) -> Any:
    """The inverse of `_write_made`.

    Raises:
        PenstockError: INVALID_ARGUMENT: a column is none.
    """
    if isinstance(said, str):
        return said
    if isinstance(said, bytes):
        return tuple(unpack_u32(name, said))
    return tuple(tuple(unpack_u32(name, sequence.ids)) for sequence in said)


def encode_structured_outputs(form: StructuredOutputsParams | None) -> requests_pb2.StructuredOutputs | None:
    """The form of an output; None: it may have any."""
    if form is None:
        return None
    value = getattr(form, form.said)
    said: dict[str, Any] = {form.said: requests_pb2.Choices(texts=value) if form.said == "choice" else value}
    return requests_pb2.StructuredOutputs(
        **said,
        disable_any_whitespace=bool(form.disable_any_whitespace),
        whitespace_pattern=form.whitespace_pattern,
    )


def _decode_structured_outputs(message: requests_pb2.StructuredOutputs) -> StructuredOutputsParams:
    said = {name: getattr(message, name) for name in FORMS if message.HasField(name)}
    if "choice" in said:
        said["choice"] = tuple(message.choice.texts)
    return StructuredOutputsParams(
        **said,
        disable_any_whitespace=message.disable_any_whitespace,
        whitespace_pattern=message.whitespace_pattern if message.HasField("whitespace_pattern") else None,
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
    return Stopping(**_decode_part(Part.STOPPING, message))


def decode_text_options(message: requests_pb2.TextParameters) -> TextOptions:
    """The detokenizer's part of the parameters."""
    return TextOptions(**_decode_part(Part.TEXT, message))


def _encode_part(part: Part, values: Sampling | Stopping | TextOptions) -> dict[str, Any]:
    """The fields of a part's message; None is told by their absence."""
    return {
        name: value for each in PARTS[part] for name, value in encode_value(each, getattr(values, each.field)).items()
    }


def encode_value(parameter: Parameter, value: Any) -> dict[str, Any]:
    """The fields of its part's message that say what a parameter is; `value` as its part has it."""
    match parameter.kind:
        case TokenIds() if value is not None:
            return {parameter.field: pack_u32(value)}
        case Repetition() if value is not None:
            return {parameter.field: requests_pb2.RepetitionDetection(**asdict(value))}
        case Biases():
            ids, biases = zip(*value, strict=True) if value else ((), ())
            return {
                f"{parameter.field}_ids": pack_u32(ids),
                f"{parameter.field}_values": np.array(biases, "<f4").tobytes(),
            }
        case _:
            return {parameter.field: value}


def _decode_part(part: Part, message: ProtobufMessage) -> dict[str, Any]:
    """Read what a part's message says, by the names that it has there; what is absent has its default."""
    found = {}
    for each in PARTS[part]:
        if isinstance(each.kind, Biases) or not _has_presence(message, each.field) or message.HasField(each.field):
            found[each.field] = decode_value(each, message)
    return found


def decode_value(parameter: Parameter, message: ProtobufMessage) -> Any:
    """The inverse of `encode_value`, of a field that is there.

    Raises:
        PenstockError: INVALID_ARGUMENT naming the field: it is no column of as many bytes as it must have.
    """
    where = f"{parameter.part.value}.{parameter.field}"
    match parameter.kind:
        case TokenIds():
            return tuple(unpack_u32(where, getattr(message, parameter.field)))
        case Biases():
            values_field = f"{parameter.field}_values"
            ids, packed = (
                unpack_u32(f"{where}_ids", getattr(message, f"{parameter.field}_ids")),
                getattr(message, values_field),
            )
            if len(packed) != 4 * len(ids):
                raise invalid(f"{values_field} must have a value for each of {parameter.field}_ids", values_field)
            return tuple(zip(ids, np.frombuffer(packed, "<f4").tolist(), strict=True))
        case Strings():
            return tuple(getattr(message, parameter.field))
        case Repetition():
            said = getattr(message, parameter.field)
            return RepetitionDetectionParams(
                **{each.name: getattr(said, each.name) for each in fields(RepetitionDetectionParams)}
            )
        case _:
            return getattr(message, parameter.field)


def _has_presence(message: ProtobufMessage, field: str) -> bool:
    return message.DESCRIPTOR.fields_by_name[field].has_presence


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
    extra = {**(extra or {}), **_turn(message)} or None
    if message.parts_json:
        parts = _read_json(f"{where}.parts_json", message.parts_json, list[dict[str, Any]])
        for index, part in enumerate(parts):
            if part.get("type") != "text" or not isinstance(part.get("text"), str):
                name = f"{where}.parts_json[{index}]"
                raise invalid(f"{name} must be an object with the type 'text' and a text", name)
        return Message(message.role, tuple(parts), extra)
    return Message(message.role, message.content if message.HasField("content") or not extra else None, extra)


def _turn(message: requests_pb2.ChatMessage) -> dict[str, Any]:
    """The fields of their own in which a client tells of a turn, as OpenAI's clients name them."""
    calls = [
        {"id": each.id, "type": "function", "function": {"name": each.name, "arguments": each.arguments}}
        for each in message.tool_calls
    ]
    said = {"reasoning": message.reasoning, "tool_calls": calls, "tool_call_id": message.tool_call_id}
    return {name: value for name, value in said.items() if value}


def _read_json(where: str, text: str, kind: type[J]) -> J:
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise invalid(f"{where} cannot be read as JSON: {error}", where) from error
