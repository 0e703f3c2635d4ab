"""Text rows, finished results and offsets: what comes from detokenizers and what they are asked for."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from contract.domain.chain import CHAIN_START
from contract.domain.errors import ErrorCode, PoisonMessageError
from contract.domain.finish import FinishReason, RequestError, Usage
from contract.domain.rows import REQUEST_ID_BYTES, TextRow
from contract.domain.timeline import Timeline
from contract.v1 import common_pb2, text_pb2
from contract.wire.requests import pack_u32
from contract.wire.timeline import decode_timeline
from gateway_svc.core.logprob_columns import LogprobColumns
from gateway_svc.core.streams import DeliveredSequence

_REASONS = tuple(FinishReason)


def decode_text(payload: bytes) -> tuple[int, list[TextRow]]:
    """The time at which a TextBatch was sent (Unix nanoseconds), and its rows.

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
    first_rows = np.frombuffer(batch.first_rows, "<u4").tolist()
    prompts = dict(zip(first_rows, np.frombuffer(batch.prompt_tokens, "<u4").tolist(), strict=True))
    model_digest = batch.model_digest
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
        if row in prompts:
            end["num_prompt_tokens"] = prompts[row]
        of_row = (request_id, sequence, token_offset, text_offset, chain, new_ids, text, new_logprobs)
        rows.append(TextRow(*of_row, model_digest=model_digest, **end))
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
        ranks=columns.ranks,
        top_counts=columns.top_counts,
        top_ids=columns.top_ids,
        top_logprobs=columns.top_logprobs,
        byte_counts=columns.byte_counts,
        token_bytes=columns.token_bytes,
        text_offsets=columns.text_offsets,
    )


def encode_offsets(sequences: Sequence[DeliveredSequence]) -> bytes:
    """A penstock.v1.AttachOffsets: what the client has of each sample."""
    return text_pb2.AttachOffsets(
        token_offsets=pack_u32(each.num_tokens for each in sequences),
        text_offsets=pack_u32(each.num_chars for each in sequences),
        chains=np.fromiter((each.chain for each in sequences), "<u8").tobytes(),
    ).SerializeToString()


def decode_finished_timeline(payload: bytes) -> Timeline:
    """The times of a FinishedRequest.

    Raises:
        PoisonMessageError: not a FinishedRequest.
    """
    try:
        return decode_timeline(text_pb2.FinishedRequest.FromString(payload).timeline)
    except DecodeError as error:
        raise PoisonMessageError(f"not a FinishedRequest: {error}") from error


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
            ends = _end(each.end) | {
                "num_prompt_tokens": finished.usage.prompt_tokens,
                "model_digest": finished.model_digest,
            }
            rows.append(TextRow(request_id, sequence, 0, 0, CHAIN_START, token_ids, each.text, logprobs, **ends))
    except (DecodeError, ValueError, IndexError) as error:
        raise PoisonMessageError(f"not a FinishedRequest: {error}") from error
    return rows
