"""Protobuf to domain and back: the log and attachments in, text rows and results out."""

from collections.abc import Mapping
from functools import lru_cache

import numpy as np
from google.protobuf.message import DecodeError

from detokenizer_svc.core.logprobs import LogprobLog
from detokenizer_svc.core.request import FinishedRequest, OpenRequest
from detokenizer_svc.core.sequence import Offset
from detokenizer_svc.core.textrows import SequenceEnd, TextRows
from penstock.domain.errors import ErrorCode
from penstock.domain.finish import FinishReason, RequestError, Usage
from penstock.domain.params import MAX_N
from penstock.domain.plan import U32, Logprobs
from penstock.domain.request import Header
from penstock.domain.rows import REQUEST_ID_BYTES, TextRow, TokenLogprob, TokenRows
from penstock.v1 import common_pb2, inference_pb2, requests_pb2, text_pb2, tokens_pb2
from penstock.wire import decode_header, decode_text_options, encode_header, num_samples
from servicekit.bus import keys as k


class PoisonMessageError(Exception):
    """A message that cannot be read; its text says why.

    `request_ids` are those that it concerns; None if not even that can be told.
    """

    def __init__(self, why: str, request_ids: list[bytes] | None = None) -> None:
        super().__init__(why)
        self.request_ids = request_ids


# --- the log ----------------------------------------------------------------------------------------------------------


def decode_opening(fields: Mapping[bytes, bytes]) -> OpenRequest:
    """A request as its log opens it.

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
        num_prompt_tokens=len(meta.token_ids) // 4,
        text=decode_text_options(body.text_options),
        min_tokens=body.stopping.min_tokens,
        stop_token_ids=tuple(stop_token_ids),
        eos_token_ids=() if body.stopping.ignore_eos else tuple(eos),
        wants_logprobs=body.sampling.HasField("num_logprobs"),
    )


def unreadable_request(request_id: bytes) -> OpenRequest:
    """Stands in for a request whose opening cannot be read, so that it can be ended."""
    return OpenRequest(Header(request_id, "", 0, 0, 0, "", 0), n=1, num_prompt_tokens=0)


def decode_tokens(payload: bytes) -> tuple[int, TokenRows]:
    """When a TokenBatch was sent (Unix nanoseconds), and its rows.

    Raises:
        PoisonMessageError: not a TokenBatch, or its columns do not fit together.
    """
    try:
        batch = tokens_pb2.TokenBatch.FromString(payload)
    except DecodeError as error:
        raise PoisonMessageError(f"not a TokenBatch: {error}") from error
    if len(batch.request_ids) % REQUEST_ID_BYTES:
        raise PoisonMessageError(f"{len(batch.request_ids)} bytes of request ids")
    request_ids = _split(batch.request_ids)
    try:
        rows = _rows(batch, request_ids)
        _check(rows)
    except ValueError as error:
        raise PoisonMessageError(f"not a TokenBatch: {error}", request_ids) from error
    return batch.origin.sent_unix_ns, rows


def _rows(batch: tokens_pb2.TokenBatch, request_ids: list[bytes]) -> TokenRows:
    cached = np.frombuffer(batch.cached_tokens, "<u4") if batch.cached_tokens else np.zeros(len(request_ids), "<u4")
    error_rows = np.frombuffer(batch.error_rows, "<u4").tolist()
    return TokenRows(
        request_ids=request_ids,
        sequences=np.frombuffer(batch.sequences, "<u4"),
        positions=np.frombuffer(batch.positions, "<u4"),
        chains=np.frombuffer(batch.chains, "<u8"),
        counts=np.frombuffer(batch.counts, "<u4"),
        token_ids=np.frombuffer(batch.token_ids, "<u4"),
        finishes=np.frombuffer(batch.finishes, np.uint8),
        cached_tokens=cached,
        logprobs=_logprobs(batch.logprobs) if batch.HasField("logprobs") else None,
        errors={row: _request_error(error) for row, error in zip(error_rows, batch.errors, strict=True)},
    )


def _check(rows: TokenRows) -> None:
    num_rows, num_tokens = len(rows), len(rows.token_ids)
    columns = (rows.sequences, rows.positions, rows.chains, rows.counts, rows.finishes, rows.cached_tokens)
    lengths = [len(column) for column in columns]
    if lengths != [num_rows] * len(columns):
        raise ValueError(f"columns of {lengths} values for {num_rows} rows")
    if int(rows.counts.sum(dtype=np.uint64)) != num_tokens:
        raise ValueError(f"{num_tokens} token ids for counts that add up to {rows.counts.sum(dtype=np.uint64)}")
    if num_rows and rows.finishes.max() > max(FinishReason):
        raise ValueError(f"finish reason {rows.finishes.max()}")
    logprobs = rows.logprobs
    if logprobs is None:
        return
    num_top = int(logprobs.top_counts.sum(dtype=np.uint64))
    found = (len(logprobs.sampled), len(logprobs.top_counts), len(logprobs.top_ids), len(logprobs.top_logprobs))
    if found != (num_tokens, num_tokens, num_top, num_top):
        raise ValueError(f"logprob columns of {found} values for {num_tokens} tokens")


@lru_cache(maxsize=64)
def _split(request_ids: bytes) -> list[bytes]:
    """The ids of a column. Decoding steps have the same column one after the other."""
    return [request_ids[start : start + REQUEST_ID_BYTES] for start in range(0, len(request_ids), REQUEST_ID_BYTES)]


def _logprobs(columns: common_pb2.LogprobColumns) -> Logprobs:
    return Logprobs(
        sampled=np.frombuffer(columns.sampled, "<f4"),
        top_counts=np.frombuffer(columns.top_counts, "<u4"),
        top_ids=np.frombuffer(columns.top_ids, "<u4"),
        top_logprobs=np.frombuffer(columns.top_logprobs, "<f4"),
    )


def _request_error(error: common_pb2.Error) -> RequestError:
    # A code of a newer version is not known here.
    code = ErrorCode(error.code) if error.code <= max(ErrorCode) else ErrorCode.UNSPECIFIED
    return RequestError(code, error.message, error.param)


def encode_checkpoint(rows: TokenRows, session: bytes, sent_ns: int) -> bytes:
    """A penstock.v1.TokenBatch that was computed by nobody: what a log had of one request."""
    batch = tokens_pb2.TokenBatch(
        origin=common_pb2.Origin(session=session, sent_unix_ns=sent_ns),
        request_ids=b"".join(rows.request_ids),
        sequences=rows.sequences.tobytes(),
        positions=rows.positions.tobytes(),
        chains=rows.chains.tobytes(),
        counts=rows.counts.tobytes(),
        token_ids=rows.token_ids.tobytes(),
        finishes=rows.finishes.tobytes(),
        cached_tokens=rows.cached_tokens.tobytes() if rows.cached_tokens.any() else b"",
        error_rows=np.fromiter(rows.errors, "<u4").tobytes(),
        errors=[_error(error) for error in rows.errors.values()],
    )
    if rows.logprobs is not None:
        batch.logprobs.sampled = rows.logprobs.sampled.tobytes()
        batch.logprobs.top_counts = rows.logprobs.top_counts.tobytes()
        batch.logprobs.top_ids = rows.logprobs.top_ids.tobytes()
        batch.logprobs.top_logprobs = rows.logprobs.top_logprobs.tobytes()
    return batch.SerializeToString()


def decode_offsets(payload: bytes) -> list[Offset]:
    """What a client has of each sequence.

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
    )
    if rows.logprobs is not None:
        batch.logprobs.CopyFrom(_logprob_columns(rows.logprobs))
    if rows.ends:
        batch.end_rows = np.fromiter(rows.ends, "<u4").tobytes()
        batch.ends.extend(_end(end) for end in rows.ends.values())
    return batch.SerializeToString()


def encode_finished(request: FinishedRequest) -> bytes:
    """A penstock.v1.FinishedRequest."""
    message = text_pb2.FinishedRequest(
        header=encode_header(request.header),
        usage=_usage(request.usage),
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
        message.error.CopyFrom(_error(end.error))
    if end.usage is not None:
        message.usage.CopyFrom(_usage(end.usage))
    return message


def _error(error: RequestError) -> common_pb2.Error:
    return common_pb2.Error(code=common_pb2.ErrorCode.ValueType(error.code), message=error.message, param=error.param)


def _usage(usage: Usage) -> common_pb2.Usage:
    return common_pb2.Usage(
        prompt_tokens=usage.num_prompt_tokens,
        output_tokens=usage.num_output_tokens,
        cached_tokens=usage.num_cached_tokens,
    )


def _logprob_columns(log: LogprobLog) -> common_pb2.LogprobColumns:
    columns, token_bytes = log.columns(), log.token_bytes()
    return common_pb2.LogprobColumns(
        sampled=columns.sampled.tobytes(),
        top_counts=columns.top_counts.tobytes(),
        top_ids=columns.top_ids.tobytes(),
        top_logprobs=columns.top_logprobs.tobytes(),
        byte_counts=np.array([len(each) for each in token_bytes], "<u4").tobytes(),
        token_bytes=b"".join(token_bytes),
    )


# --- what gRPC clients see --------------------------------------------------------------------------------------------


def delta(row: TextRow) -> inference_pb2.Delta:
    """A row as a message of `Stream`."""
    message = inference_pb2.Delta(
        sequence=row.sequence,
        token_offset=row.token_offset,
        token_ids=_u32(row.token_ids),
        text=row.text,
        logprobs=[_token_logprob(entry) for entry in row.logprobs],
        finish_reason=common_pb2.FinishReason.ValueType(row.finish),
        usage=None if row.usage is None else _usage(row.usage),
    )
    if isinstance(row.stop_reason, str):
        message.stop_string = row.stop_reason
    elif row.stop_reason is not None:
        message.stop_token_id = row.stop_reason
    return message


def _token_logprob(entry: TokenLogprob) -> inference_pb2.TokenLogprob:
    return inference_pb2.TokenLogprob(
        token_id=entry.token_id,
        text=entry.token_bytes.decode("utf-8", "replace"),
        utf8=entry.token_bytes,
        logprob=entry.logprob,
        top=[
            inference_pb2.TokenLogprob(
                token_id=token_id, text=data.decode("utf-8", "replace"), utf8=data, logprob=logprob
            )
            for (token_id, logprob), data in zip(entry.top, entry.top_bytes, strict=True)
        ],
    )


def _u32(values: tuple[int, ...]) -> bytes:
    packed: U32 = np.array(values, "<u4")
    return packed.tobytes()
