"""Protobuf to domain and back: the log and attachments in, text rows and results out."""

from collections.abc import Mapping

import numpy as np
from google.protobuf.message import DecodeError

from contract.domain.errors import PoisonMessageError
from contract.domain.finish import FinishReason, Usage
from contract.domain.params import MAX_N
from contract.domain.request import Header
from contract.domain.rows import TextRow, TokenRows
from contract.domain.timeline import Computed
from contract.v1 import common_pb2, inference_pb2, requests_pb2, text_pb2
from contract.wire import tokens
from contract.wire.deltas import encode_delta, encode_usage
from contract.wire.requests import decode_header, decode_text_options, encode_header, num_samples
from contract.wire.timeline import decode_timeline, encode_timeline
from detokenizer_svc.core.logprobs import LogprobLog
from detokenizer_svc.core.request import FinishedRequest, OpenRequest
from detokenizer_svc.core.sequence import Offset
from detokenizer_svc.core.spans import Asked, Trace
from detokenizer_svc.core.textrows import SequenceEnd, TextRows
from servicekit.bus import keys as k

# --- the log ----------------------------------------------------------------------------------------------------------


def decode_opening(fields: Mapping[bytes, bytes], opened_ns: int = 0) -> OpenRequest:
    """A request as its log opens it, at this Unix time.

    Raises:
        PoisonMessageError: its header, body or tokens cannot be read.
    """
    request_id = fields[k.REQUEST]
    try:
        body = requests_pb2.GenerateRequest.FromString(fields[k.BODY])
        meta = requests_pb2.TokenizedPrompt.FromString(fields[k.META])
        header = decode_header(common_pb2.Header.FromString(fields[k.HEADER]))
        eos = np.frombuffer(meta.eos_token_ids, "<u4").tolist()
        stop_token_ids = np.frombuffer(body.stopping.stop_token_ids, "<u4").tolist()
    except (DecodeError, ValueError, KeyError) as error:
        raise PoisonMessageError(f"a request's opening cannot be read: {error}", [request_id]) from error
    if header.request_id != request_id:
        raise PoisonMessageError("a request's opening has the header of another request", [request_id])
    n = num_samples(body)
    if not 1 <= n <= MAX_N:
        raise PoisonMessageError(f"a request for {n} samples was opened", [request_id])
    return OpenRequest(
        header=header,
        n=n,
        num_prompt_tokens=meta.num_tokens,
        text=decode_text_options(body.text_options),
        min_tokens=body.stopping.min_tokens,
        stop_token_ids=tuple(stop_token_ids),
        eos_token_ids=() if body.stopping.ignore_eos else tuple(eos),
        wants_logprobs=body.sampling.HasField("num_logprobs") or body.HasField("beams"),
        has_search=body.HasField("beams"),
        asked=_asked(body),
        tokenizing_ns=meta.tokenizing_unix_ns,
        tokenized_ns=meta.tokenized_unix_ns,
        opened_ns=opened_ns,
    )


def _asked(body: requests_pb2.GenerateRequest) -> Asked:
    sampling, stopping = body.sampling, body.stopping
    return Asked(
        model=body.model,
        is_chat=body.HasField("messages"),
        temperature=sampling.temperature if sampling.HasField("temperature") else None,
        top_p=sampling.top_p if sampling.HasField("top_p") else None,
        max_tokens=stopping.max_tokens if stopping.HasField("max_tokens") else None,
    )


def unreadable_request(request_id: bytes) -> OpenRequest:
    """Stands in for a request whose opening cannot be read, so that it can be ended."""
    return OpenRequest(Header(request_id, "", 0, 0, 0, "", 0), n=1, num_prompt_tokens=0)


def decode_tokens(payload: bytes) -> tuple[Computed, TokenRows]:
    """Read the place and time at which a TokenBatch was made, and its rows.

    Raises:
        PoisonMessageError: not a TokenBatch, or its columns do not fit together.
    """
    return tokens.decode_rows(payload)


def encode_checkpoint(rows: TokenRows, session: bytes, sent_ns: int) -> bytes:
    """A penstock.v1.TokenBatch that was computed by nobody: what a log had of one request."""
    return tokens.encode_rows(rows, session, Computed(sent_ns=sent_ns))


def decode_offsets(payload: bytes) -> list[Offset]:
    """Read what a client has of each sequence.

    Raises:
        PoisonMessageError: not AttachOffsets.
    """
    try:
        message = text_pb2.AttachOffsets.FromString(payload)
        tokens = np.frombuffer(message.token_offsets, "<u4").tolist()
        chars, chains = (np.frombuffer(message.text_offsets, "<u4"), np.frombuffer(message.chains, "<u8"))
        return [Offset(*each) for each in zip(tokens, chars.tolist(), chains.tolist(), strict=True)]
    except (DecodeError, ValueError) as error:
        raise PoisonMessageError(f"not AttachOffsets: {error}") from error


# --- text -------------------------------------------------------------------------------------------------------------


def encode_text(rows: TextRows, session: bytes, sent_ns: int) -> bytes:
    """A penstock.v1.TextBatch."""
    batch = text_pb2.TextBatch(
        origin=common_pb2.Origin(session=session, sent_unix_ns=sent_ns),
        request_ids=b"".join(rows.request_ids),
        sequences=rows.sequences.tobytes(),
        token_offsets=rows.token_offsets.tobytes(),
        text_offsets=rows.text_offsets.tobytes(),
        chains=rows.chains.tobytes(),
        counts=rows.counts.tobytes(),
        token_ids=rows.token_ids.tobytes(),
        texts=rows.texts,
        model_digest=rows.model_digest,
    )
    if rows.logprobs is not None:
        batch.logprobs.CopyFrom(_logprob_columns(rows.logprobs))
    if rows.prompts:
        batch.first_rows = np.fromiter(rows.prompts, "<u4").tobytes()
        batch.prompt_tokens = np.fromiter(rows.prompts.values(), "<u4").tobytes()
    if rows.ends:
        batch.end_rows = np.fromiter(rows.ends, "<u4").tobytes()
        batch.ends.extend(_end(end) for end in rows.ends.values())
    return batch.SerializeToString()


def encode_finished(request: FinishedRequest) -> bytes:
    """A penstock.v1.FinishedRequest."""
    message = text_pb2.FinishedRequest(
        header=encode_header(request.header),
        usage=encode_usage(request.usage),
        model_digest=request.model_digest,
        timeline=encode_timeline(request.timeline),
    )
    for sequence in request.sequences:
        message.sequences.add(
            text=sequence.text,
            token_ids=sequence.token_ids.tobytes(),
            logprobs=None if sequence.logprobs is None else _logprob_columns(sequence.logprobs),
            end=_end(sequence.end),
        )
    return message.SerializeToString()


def _end(end: SequenceEnd) -> text_pb2.SequenceEnd:
    message = text_pb2.SequenceEnd(reason=common_pb2.FinishReason.ValueType(end.reason))
    if isinstance(end.stop_reason, str):
        message.stop_string = end.stop_reason
    elif end.stop_reason is not None:
        message.stop_token_id = end.stop_reason
    if end.error is not None:
        message.error.CopyFrom(tokens.encode_error(end.error))
    if end.usage is not None:
        message.usage.CopyFrom(encode_usage(end.usage))
    return message


def _logprob_columns(log: LogprobLog) -> common_pb2.LogprobColumns:
    columns, token_bytes = tokens.encode_logprobs(log.columns()), log.token_bytes()
    columns.byte_counts = np.array([len(each) for each in token_bytes], "<u4").tobytes()
    columns.token_bytes = b"".join(token_bytes)
    columns.text_offsets = log.text_offsets().tobytes()
    return columns


# --- traces -----------------------------------------------------------------------------------------------------------


def encode_trace(trace: Trace) -> bytes:
    """A penstock.v1.TraceRecord."""
    asked = trace.asked
    result = text_pb2.FinishedRequest(
        header=encode_header(trace.header), usage=encode_usage(trace.usage), timeline=encode_timeline(trace.timeline)
    )
    for reason in trace.reasons:
        # Of an error that several samples have, one is told.
        error = trace.error if reason is FinishReason.ERROR else None
        result.sequences.add(end=_end(SequenceEnd(reason, error=error)))
    return text_pb2.TraceRecord(
        result=result,
        model=asked.model,
        chat=asked.is_chat,
        temperature=asked.temperature,
        top_p=asked.top_p,
        max_tokens=asked.max_tokens,
    ).SerializeToString()


def decode_trace(payload: bytes) -> Trace:
    """The inverse of `encode_trace`.

    Raises:
        PoisonMessageError: not a TraceRecord.
    """
    try:
        record = text_pb2.TraceRecord.FromString(payload)
        result = record.result
        errors = [tokens.decode_error(each.end.error) for each in result.sequences if each.end.HasField("error")]
        return Trace(
            decode_header(result.header),
            Asked(
                record.model,
                record.chat,
                record.temperature if record.HasField("temperature") else None,
                record.top_p if record.HasField("top_p") else None,
                record.max_tokens if record.HasField("max_tokens") else None,
            ),
            Usage(result.usage.prompt_tokens, result.usage.output_tokens, result.usage.cached_tokens),
            decode_timeline(result.timeline),
            tuple(FinishReason(each.end.reason) for each in result.sequences),
            errors[0] if errors else None,
        )
    except (DecodeError, ValueError) as error:
        raise PoisonMessageError(f"not a TraceRecord: {error}") from error


# --- what gRPC clients see --------------------------------------------------------------------------------------------


def delta(row: TextRow) -> inference_pb2.Delta:
    """A row as a message of `Stream`."""
    return encode_delta(row, row.sequence)
