"""The log: token rows and what is in them."""

from functools import lru_cache

import numpy as np
from google.protobuf.message import DecodeError

from contract.domain.errors import ErrorCode, PoisonMessageError
from contract.domain.finish import FinishReason, RequestError
from contract.domain.plan import Logprobs, PromptLogprobs
from contract.domain.rows import REQUEST_ID_BYTES, TokenRows
from contract.domain.timeline import Computed, Start
from contract.v1 import common_pb2, tokens_pb2
from contract.wire.timeline import decode_timeline, encode_timeline, start_reason

_CODES = frozenset(ErrorCode)


def encode_rows(rows: TokenRows, session: bytes, computed: Computed) -> bytes:
    """A penstock.v1.TokenBatch.

    Args:
        rows: of one shard.
        session: who writes it.
        computed: by whom, in which step, and when they are sent.
    """
    columns = tokens_pb2.TokenColumns(
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
        model_digest=rows.model_digest,
        timeline=None if rows.timeline is None else encode_timeline(rows.timeline),
    )
    if rows.starts:
        columns.started_rows = np.fromiter(rows.starts, "<u4").tobytes()
        columns.started_unix_ns = np.fromiter((start.at_ns for start in rows.starts.values()), "<u8").tobytes()
        columns.start_reasons = bytes(start.reason for start in rows.starts.values())
        columns.worker = computed.worker
    return tokens_pb2.TokenBatch(
        origin=common_pb2.Origin(session=session, sent_unix_ns=computed.sent_ns),
        incarnation=computed.incarnation,
        step=computed.step,
        request_ids=b"".join(rows.request_ids),
        columns=columns.SerializeToString(),
    ).SerializeToString()


def decode_rows(payload: bytes) -> tuple[Computed, TokenRows]:
    """The place and time at which a TokenBatch was made, and its rows.

    Raises:
        PoisonMessageError: its columns cannot be read or do not fit together: it names the requests whose they are; or
            it is no TokenBatch, and so nobody's.
    """
    try:
        batch = tokens_pb2.TokenBatch.FromString(payload)
    except DecodeError as error:
        raise PoisonMessageError(f"not a TokenBatch: {error}") from error
    if len(batch.request_ids) % REQUEST_ID_BYTES:
        raise PoisonMessageError(f"not a TokenBatch: {len(batch.request_ids)} bytes of request ids")
    request_ids = _split(batch.request_ids)
    try:
        columns = tokens_pb2.TokenColumns.FromString(batch.columns)
        rows = _rows(columns, request_ids)
        _check(rows)
    except (DecodeError, ValueError) as error:
        raise PoisonMessageError(f"a TokenBatch whose columns are damaged: {error}", request_ids or None) from error
    return Computed(columns.worker, batch.incarnation, batch.step, batch.origin.sent_unix_ns), rows


def _rows(columns: tokens_pb2.TokenColumns, request_ids: list[bytes]) -> TokenRows:
    cached = np.frombuffer(columns.cached_tokens, "<u4") if columns.cached_tokens else np.zeros(len(request_ids), "<u4")
    token_ids = np.frombuffer(columns.token_ids, "<u4")
    error_rows = np.frombuffer(columns.error_rows, "<u4").tolist()
    return TokenRows(
        request_ids=request_ids,
        sequences=np.frombuffer(columns.sequences, "<u4"),
        positions=np.frombuffer(columns.positions, "<u4"),
        chains=np.frombuffer(columns.chains, "<u8"),
        counts=np.frombuffer(columns.counts, "<u4"),
        token_ids=token_ids,
        finishes=np.frombuffer(columns.finishes, np.uint8),
        cached_tokens=cached,
        logprobs=decode_logprobs(columns.logprobs, len(token_ids)) if columns.HasField("logprobs") else None,
        errors={row: decode_error(error) for row, error in zip(error_rows, columns.errors, strict=True)},
        model_digest=columns.model_digest,
        starts=_starts(columns) if columns.started_rows else {},
        timeline=decode_timeline(columns.timeline) if columns.HasField("timeline") else None,
    )


def _starts(columns: tokens_pb2.TokenColumns) -> dict[int, Start]:
    rows = np.frombuffer(columns.started_rows, "<u4").tolist()
    times = np.frombuffer(columns.started_unix_ns, "<u8").tolist()
    several = zip(rows, times, columns.start_reasons, strict=True)
    return {row: Start(at_ns, start_reason(reason)) for row, at_ns, reason in several}


def _check(rows: TokenRows) -> None:
    num_rows, num_tokens = len(rows), len(rows.token_ids)
    columns = (rows.sequences, rows.positions, rows.chains, rows.counts, rows.finishes, rows.cached_tokens)
    lengths = [len(column) for column in columns]
    if lengths != [num_rows] * len(columns):
        raise ValueError(f"columns of {lengths} values for {num_rows} rows")
    if int(rows.counts.sum(dtype=np.uint64)) != num_tokens:
        raise ValueError(f"{num_tokens} token ids for counts that add up to {rows.counts.sum(dtype=np.uint64)}")
    if rows.starts and max(rows.starts) >= num_rows:
        raise ValueError(f"a start of row {max(rows.starts)}")
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
        ranks=logprobs.ranks.astype("<u4", copy=False).tobytes(),
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
        ranks=np.frombuffer(columns.ranks, "<u4"),
        top_counts=np.frombuffer(columns.top_counts, "<u4"),
        top_ids=np.frombuffer(columns.top_ids, "<u4"),
        top_logprobs=np.frombuffer(columns.top_logprobs, "<f4"),
    )
    num_top = int(logprobs.top_counts.sum(dtype=np.uint64))
    of_tokens = (logprobs.sampled, logprobs.ranks, logprobs.top_counts)
    found = tuple(map(len, (*of_tokens, logprobs.top_ids, logprobs.top_logprobs)))
    if found != (num_tokens, num_tokens, num_tokens, num_top, num_top):
        raise ValueError(f"logprob columns of {found} values for {num_tokens} tokens")
    return logprobs


def encode_prompt_logprobs(prompt: PromptLogprobs) -> common_pb2.PromptLogprobs:
    """Logprobs of a prompt, without the bytes of its tokens."""
    token_ids = prompt.token_ids.astype("<u4", copy=False).tobytes()
    return common_pb2.PromptLogprobs(token_ids=token_ids, logprobs=encode_logprobs(prompt.logprobs))


def decode_prompt_logprobs(message: common_pb2.PromptLogprobs) -> PromptLogprobs:
    """The inverse of `encode_prompt_logprobs`.

    Raises:
        ValueError: the columns do not fit together.
    """
    token_ids = np.frombuffer(message.token_ids, "<u4")
    return PromptLogprobs(token_ids, decode_logprobs(message.logprobs, len(token_ids)))


def encode_error(error: RequestError) -> common_pb2.Error:
    """The error of a request that failed."""
    return common_pb2.Error(code=common_pb2.ErrorCode.ValueType(error.code), message=error.message, param=error.param)


def decode_error(message: common_pb2.Error) -> RequestError:
    """The inverse of `encode_error`; a code that this version does not know counts as INTERNAL."""
    number = int(message.code)
    code = ErrorCode(number) if number in _CODES else ErrorCode.INTERNAL
    return RequestError(code, message.message, message.param)
