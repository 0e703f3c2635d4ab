"""The log: token rows and what is in them."""

from functools import lru_cache

import numpy as np
from google.protobuf.message import DecodeError

from penstock.domain.errors import ErrorCode, PoisonMessageError
from penstock.domain.finish import FinishReason, RequestError
from penstock.domain.plan import Logprobs
from penstock.domain.rows import REQUEST_ID_BYTES, TokenRows
from penstock.v1 import common_pb2, tokens_pb2

_CODES = frozenset(ErrorCode)


def encode_rows(rows: TokenRows, session: bytes, incarnation: bytes, step: int, sent_ns: int) -> bytes:
    """A penstock.v1.TokenBatch.

    Args:
        rows: of one shard.
        session: who writes it.
        incarnation: of the worker that computed them; empty: they are not of a step.
        step: in which it did; 0: none.
        sent_ns: Unix time, nanoseconds.
    """
    return tokens_pb2.TokenBatch(
        origin=common_pb2.Origin(session=session, sent_unix_ns=sent_ns),
        incarnation=incarnation,
        step=step,
        request_ids=b"".join(rows.request_ids),
        sequences=rows.sequences.astype("<u4", copy=False).tobytes(),
        positions=rows.positions.astype("<u4", copy=False).tobytes(),
        chains=rows.chains.astype("<u8", copy=False).tobytes(),
        counts=rows.counts.astype("<u4", copy=False).tobytes(),
        token_ids=rows.token_ids.astype("<u4", copy=False).tobytes(),
        finishes=rows.finishes.tobytes(),
        cached_tokens=rows.cached_tokens.astype("<u4", copy=False).tobytes() if rows.cached_tokens.any() else b"",
        logprobs=None if rows.logprobs is None else encode_logprobs(rows.logprobs),
        error_rows=np.fromiter(rows.errors, "<u4").tobytes(),
        errors=map(encode_error, rows.errors.values()),
    ).SerializeToString()


def decode_rows(payload: bytes) -> tuple[int, TokenRows]:
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
    token_ids = np.frombuffer(batch.token_ids, "<u4")
    error_rows = np.frombuffer(batch.error_rows, "<u4").tolist()
    return TokenRows(
        request_ids=request_ids,
        sequences=np.frombuffer(batch.sequences, "<u4"),
        positions=np.frombuffer(batch.positions, "<u4"),
        chains=np.frombuffer(batch.chains, "<u8"),
        counts=np.frombuffer(batch.counts, "<u4"),
        token_ids=token_ids,
        finishes=np.frombuffer(batch.finishes, np.uint8),
        cached_tokens=cached,
        logprobs=decode_logprobs(batch.logprobs, len(token_ids)) if batch.HasField("logprobs") else None,
        errors={row: decode_error(error) for row, error in zip(error_rows, batch.errors, strict=True)},
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


@lru_cache(maxsize=64)
def _split(request_ids: bytes) -> list[bytes]:
    """The ids of a column. Decoding steps have the same column one after the other."""
    return [request_ids[start : start + REQUEST_ID_BYTES] for start in range(0, len(request_ids), REQUEST_ID_BYTES)]


def encode_logprobs(logprobs: Logprobs) -> common_pb2.LogprobColumns:
    """Logprobs of tokens, as columns."""
    return common_pb2.LogprobColumns(
        sampled=logprobs.sampled.astype("<f4", copy=False).tobytes(),
        top_counts=logprobs.top_counts.astype("<u4", copy=False).tobytes(),
        top_ids=logprobs.top_ids.astype("<u4", copy=False).tobytes(),
        top_logprobs=logprobs.top_logprobs.astype("<f4", copy=False).tobytes(),
    )


def decode_logprobs(columns: common_pb2.LogprobColumns, num_tokens: int) -> Logprobs:
    """The logprobs of so many tokens.

    Raises:
        ValueError: the columns do not fit together.
    """
    logprobs = Logprobs(
        sampled=np.frombuffer(columns.sampled, "<f4"),
        top_counts=np.frombuffer(columns.top_counts, "<u4"),
        top_ids=np.frombuffer(columns.top_ids, "<u4"),
        top_logprobs=np.frombuffer(columns.top_logprobs, "<f4"),
    )
    num_top = int(logprobs.top_counts.sum(dtype=np.uint64))
    found = (len(logprobs.sampled), len(logprobs.top_counts), len(logprobs.top_ids), len(logprobs.top_logprobs))
    if found != (num_tokens, num_tokens, num_top, num_top):
        raise ValueError(f"logprob columns of {found} values for {num_tokens} tokens")
    return logprobs


def encode_error(error: RequestError) -> common_pb2.Error:
    """Why a request failed."""
    return common_pb2.Error(code=common_pb2.ErrorCode.ValueType(error.code), message=error.message, param=error.param)


def decode_error(message: common_pb2.Error) -> RequestError:
    """The inverse of `encode_error`; a code that this version does not know counts as INTERNAL."""
    number = int(message.code)
    code = ErrorCode(number) if number in _CODES else ErrorCode.INTERNAL
    return RequestError(code, message.message, message.param)
