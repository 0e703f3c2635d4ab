"""Protobuf to domain and back: requests, text rows, results, offsets, and what gRPC clients see."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from google.protobuf.message import DecodeError

from gateway_svc.core.logprob_columns import LogprobColumns
from gateway_svc.core.streams import SequenceState, split
from gateway_svc.pipeline import PipelineReading
from penstock.domain.chain import CHAIN_START
from penstock.domain.errors import ErrorCode, invalid
from penstock.domain.finish import FinishReason, RequestError, Usage
from penstock.domain.params import SamplingParams
from penstock.domain.request import Header, Message, Prompt, Request
from penstock.domain.rows import REQUEST_ID_BYTES, TextRow, TokenLogprob
from penstock.v1 import common_pb2, inference_pb2, requests_pb2, results_pb2, status_pb2, text_pb2
from servicekit.bus.calls import SessionInfo

_U64 = 2**64
_DELTA_TOKENS = 2048  # with 20 alternatives each
_DELTA_CHARS = 2**18
_SMALLEST = 1e-37  # of the positive numbers that a float field keeps positive
_REASONS = tuple(FinishReason)
_json = msgspec.json.Encoder()


class PoisonMessageError(Exception):
    """A message that cannot be read; its text says why."""


# --- requests ---------------------------------------------------------------------------------------------------------


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
            logit_bias_ids=_u32(token_id for token_id, _ in sampling.logit_bias),
            logit_bias_values=np.array([bias for _, bias in sampling.logit_bias], "<f4").tobytes(),
            num_logprobs=sampling.num_logprobs,
        ),
        stopping=requests_pb2.StoppingParameters(
            max_tokens=stopping.max_tokens,
            min_tokens=stopping.min_tokens,
            stop_token_ids=_u32(stopping.stop_token_ids),
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
        message.token_ids.ids = _u32(prompt.token_ids)
    else:
        message.messages.SetInParent()
        for each in prompt.messages or ():
            extra = _json.encode(each.extra).decode() if each.extra else ""
            message.messages.messages.add(role=each.role, content=each.content, extra_json=extra)
        if prompt.chat_template_kwargs:
            message.messages.template_kwargs_json = _json.encode(prompt.chat_template_kwargs).decode()
    return message.SerializeToString()


@dataclass(frozen=True, slots=True)
class GrpcAsk:
    """A checked `Generate` call."""

    model: str  # empty: the one that is served
    prompt: Prompt
    params: SamplingParams
    priority: int


def decode_generate(message: requests_pb2.GenerateRequest) -> GrpcAsk:
    """What a gRPC client asks for.

    Raises:
        PenstockError: INVALID_ARGUMENT naming the field.
    """
    return GrpcAsk(message.model, _prompt(message), _sampling_params(message), message.priority)


def _prompt(message: requests_pb2.GenerateRequest) -> Prompt:
    form = message.WhichOneof("prompt")
    if form is None:
        raise invalid("a request needs a prompt: text, token_ids or messages", "prompt")
    if form == "text":
        return Prompt(text=message.text)
    if form == "token_ids":
        ids = tuple(_unpack("token_ids.ids", message.token_ids.ids))
        if not ids:
            raise invalid("a prompt must have at least one token id", "token_ids")
        return Prompt(token_ids=ids)
    if not message.messages.messages:
        raise invalid("messages must have at least one message", "messages")
    messages = tuple(
        Message(each.role, each.content, _object(f"messages[{index}].extra_json", each.extra_json))
        for index, each in enumerate(message.messages.messages)
    )
    kwargs = _object("messages.template_kwargs_json", message.messages.template_kwargs_json)
    return Prompt(messages=messages, chat_template_kwargs=kwargs)


def _sampling_params(message: requests_pb2.GenerateRequest) -> SamplingParams:
    sampling, stopping, text = message.sampling, message.stopping, message.text_options
    given: dict[str, Any] = {
        name: getattr(sampling, name)
        for name in (
            *("temperature", "top_k", "top_p", "min_p", "repetition_penalty"),
            *("presence_penalty", "frequency_penalty"),
        )
        if sampling.HasField(name)
    }
    bias_ids = _unpack("sampling.logit_bias_ids", sampling.logit_bias_ids)
    if len(sampling.logit_bias_values) != 4 * len(bias_ids):
        raise invalid("logit_bias_values must have a value for each of logit_bias_ids", "logit_bias_values")
    given["logit_bias"] = dict(
        zip(bias_ids, np.frombuffer(sampling.logit_bias_values, "<f4").astype(float).tolist(), strict=True)
    )
    if sampling.HasField("num_logprobs"):
        given["logprobs"] = sampling.num_logprobs
    if message.HasField("seed"):
        given["seed"] = message.seed if message.seed < _U64 // 2 else message.seed - _U64
    return SamplingParams(
        n=message.n if message.HasField("n") else 1,
        max_tokens=stopping.max_tokens if stopping.HasField("max_tokens") else None,
        min_tokens=stopping.min_tokens,
        stop_token_ids=tuple(_unpack("stopping.stop_token_ids", stopping.stop_token_ids)),
        ignore_eos=stopping.ignore_eos,
        stop=tuple(text.stop),
        include_stop_str_in_output=text.include_stop_str_in_output,
        skip_special_tokens=text.skip_special_tokens if text.HasField("skip_special_tokens") else True,
        **given,
    )


def _object(where: str, text: str) -> dict[str, Any] | None:
    if not text:
        return None
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise invalid(f"{where} must be a JSON object: {error}", where) from error


def _unpack(where: str, packed: bytes) -> list[int]:
    if len(packed) % 4:
        raise invalid(f"{where} must hold 4 bytes for each value, got {len(packed)} bytes", where)
    values: list[int] = np.frombuffer(packed, "<u4").tolist()
    return values


def _u32(values: Iterable[int]) -> bytes:
    return np.fromiter(values, "<u4").tobytes()


# --- text rows --------------------------------------------------------------------------------------------------------


def decode_text(payload: bytes) -> tuple[int, list[TextRow]]:
    """When a TextBatch was sent (Unix nanoseconds), and its rows.

    Raises:
        PoisonMessageError: not a TextBatch, or its columns do not fit together.
    """
    try:
        batch = text_pb2.TextBatch.FromString(payload)
        return batch.origin.sent_unix_ns, _rows(batch)
    except (DecodeError, ValueError, IndexError) as error:
        raise PoisonMessageError(f"not a TextBatch: {error}") from error


def _rows(batch: text_pb2.TextBatch) -> list[TextRow]:
    ids = batch.request_ids
    num_rows = len(batch.texts)
    if len(ids) != num_rows * REQUEST_ID_BYTES:
        raise ValueError(f"{len(ids)} bytes of request ids for {num_rows} rows")
    counts: list[int] = np.frombuffer(batch.counts, "<u4").tolist()
    token_ids: list[int] = np.frombuffer(batch.token_ids, "<u4").tolist()
    if sum(counts) != len(token_ids):
        raise ValueError(f"{len(token_ids)} token ids for counts that add up to {sum(counts)}")
    end_rows = np.frombuffer(batch.end_rows, "<u4").tolist()
    ends = dict(zip(end_rows, batch.ends, strict=True))
    logprobs = _logprobs(batch.logprobs, len(token_ids)) if batch.HasField("logprobs") else None
    rows = []
    start = 0
    for row, (sequence, token_offset, text_offset, chain, count, text) in enumerate(
        zip(
            np.frombuffer(batch.sequences, "<u4").tolist(),
            np.frombuffer(batch.token_offsets, "<u4").tolist(),
            np.frombuffer(batch.text_offsets, "<u4").tolist(),
            np.frombuffer(batch.chains, "<u8").tolist(),
            counts,
            batch.texts,
            strict=True,
        )
    ):
        stop = start + count
        request_id = ids[row * REQUEST_ID_BYTES : (row + 1) * REQUEST_ID_BYTES]
        new_ids = tuple(token_ids[start:stop])
        new_logprobs = logprobs.tokens(start, new_ids) if logprobs is not None else ()
        end = _end(ends[row]) if row in ends else {}
        rows.append(TextRow(request_id, sequence, token_offset, text_offset, chain, new_ids, text, new_logprobs, **end))
        start = stop
    return rows


def _end(end: text_pb2.SequenceEnd) -> dict[str, Any]:
    """The last fields of a row that ends its sequence."""
    if not 0 < end.reason < len(_REASONS):
        raise ValueError(f"finish reason {end.reason}")
    error = None
    if end.HasField("error"):
        error = RequestError(error_code(end.error.code), end.error.message, end.error.param)
    stop_form = end.WhichOneof("stop_reason")
    return {
        "finish": _REASONS[end.reason],
        "stop_reason": getattr(end, stop_form) if stop_form else None,
        "error": error,
        "usage": _usage(end.usage) if end.HasField("usage") else None,
    }


def error_code(number: int) -> ErrorCode:
    """The code of this number; one of a newer version is UNSPECIFIED."""
    try:
        return ErrorCode(number)
    except ValueError:
        return ErrorCode.UNSPECIFIED


def _usage(usage: common_pb2.Usage) -> Usage:
    return Usage(usage.prompt_tokens, usage.output_tokens, usage.cached_tokens)


def _logprobs(columns: common_pb2.LogprobColumns, num_tokens: int) -> LogprobColumns:
    return LogprobColumns(
        num_tokens,
        sampled=columns.sampled,
        top_counts=columns.top_counts,
        top_ids=columns.top_ids,
        top_logprobs=columns.top_logprobs,
        byte_counts=columns.byte_counts,
        token_bytes=columns.token_bytes,
    )


# --- attaching --------------------------------------------------------------------------------------------------------


def encode_offsets(sequences: Sequence[SequenceState]) -> bytes:
    """A penstock.v1.AttachOffsets: what the client has of each sample."""
    return text_pb2.AttachOffsets(
        token_offsets=_u32(each.num_tokens for each in sequences),
        text_offsets=_u32(each.num_chars for each in sequences),
        chains=np.fromiter((each.chain for each in sequences), "<u8").tobytes(),
    ).SerializeToString()


def decode_finished(request_id: bytes, payload: bytes) -> list[TextRow]:
    """A FinishedRequest as one row for each sample, from its first token to its end.

    Raises:
        PoisonMessageError: not a FinishedRequest.
    """
    try:
        finished = text_pb2.FinishedRequest.FromString(payload)
        rows = []
        for sequence, each in enumerate(finished.sequences):
            token_ids = tuple(np.frombuffer(each.token_ids, "<u4").tolist())
            reader = _logprobs(each.logprobs, len(token_ids)) if each.HasField("logprobs") else None
            logprobs = reader.tokens(0, token_ids) if reader else ()
            rows.append(
                TextRow(request_id, sequence, 0, 0, CHAIN_START, token_ids, each.text, logprobs, **_end(each.end))
            )
    except (DecodeError, ValueError, IndexError) as error:
        raise PoisonMessageError(f"not a FinishedRequest: {error}") from error
    return rows


# --- what gRPC clients see --------------------------------------------------------------------------------------------


def deltas(row: TextRow) -> list[inference_pb2.GenerateEvent]:
    """A row as events of `Generate`: one, unless it would exceed the 4 MiB that gRPC clients take by default."""
    return [_delta(part) for part in split(row, _DELTA_TOKENS, _DELTA_CHARS)]


def _delta(row: TextRow) -> inference_pb2.GenerateEvent:
    message = inference_pb2.Delta(
        sequence=row.sequence,
        token_offset=row.token_offset,
        token_ids=_u32(row.token_ids),
        text=row.text,
        logprobs=[_token_logprob(entry) for entry in row.logprobs],
        finish_reason=common_pb2.FinishReason.ValueType(row.finish),
    )
    if isinstance(row.stop_reason, str):
        message.stop_string = row.stop_reason
    elif row.stop_reason is not None:
        message.stop_token_id = row.stop_reason
    if row.usage is not None:
        message.usage.prompt_tokens = row.usage.num_prompt_tokens
        message.usage.output_tokens = row.usage.num_output_tokens
        message.usage.cached_tokens = row.usage.num_cached_tokens
    return inference_pb2.GenerateEvent(delta=message)


def _token_logprob(entry: TokenLogprob) -> inference_pb2.TokenLogprob:
    top_bytes = entry.top_bytes or (b"",) * len(entry.top)
    return inference_pb2.TokenLogprob(
        token_id=entry.token_id,
        text=entry.token_bytes.decode(errors="replace"),
        utf8=entry.token_bytes,
        logprob=entry.logprob,
        top=[
            inference_pb2.TokenLogprob(
                token_id=token_id, text=token_bytes.decode(errors="replace"), utf8=token_bytes, logprob=logprob
            )
            for (token_id, logprob), token_bytes in zip(entry.top, top_bytes, strict=True)
        ],
    )


def decode_worker(info: bytes) -> tuple[str, int]:
    """Model name and max_model_len of a registered worker.

    Raises:
        PoisonMessageError: not a WorkerInfo.
    """
    try:
        message = results_pb2.WorkerInfo.FromString(info)
    except DecodeError as error:
        raise PoisonMessageError(f"not a WorkerInfo: {error}") from error
    return message.model, message.max_model_len


def pipeline_status(reading: PipelineReading) -> status_pb2.PipelineStatus:
    """A pool's state as `GetPipeline` tells it."""
    return status_pb2.PipelineStatus(
        pool=reading.pool,
        sessions=[_session_status(each) for each in reading.sessions],
        streams=[status_pb2.StreamStatus(stream=name, length=length) for name, length in reading.lengths.items()],
    )


def _session_status(info: SessionInfo) -> status_pb2.SessionStatus:
    try:
        status = status_pb2.ServiceStatus.FromString(info.status)
    except DecodeError:
        status = status_pb2.ServiceStatus()  # of a version that speaks otherwise: it is shown without figures
    return status_pb2.SessionStatus(
        kind=info.kind.value,
        name=info.name,
        address=info.address,
        alive=info.alive,
        owned_requests=info.num_owned,
        status=status,
    )
