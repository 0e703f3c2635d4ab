"""Protobuf to domain and back: requests, plans, results and the rows of the log."""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from penstock.domain import chain
from penstock.domain.errors import ErrorCode, PenstockError
from penstock.domain.finish import FinishReason, RequestError
from penstock.domain.params import MAX_N
from penstock.domain.plan import F32, U32, Admission, Logprobs, StepPlan, StepResult
from penstock.domain.rows import REQUEST_ID_BYTES, TokenRows
from penstock.v1 import common_pb2, requests_pb2, results_pb2, steps_pb2, tokens_pb2
from penstock.wire import decode_sampling, decode_stopping, encode_sampling
from scheduler_svc.core.history import History
from scheduler_svc.core.sequence import QueuedRequest
from scheduler_svc.core.worker import WorkerLimits

_CODES = frozenset(ErrorCode)


class PoisonMessageError(Exception):
    """A message that cannot be read; its text says why."""


# --- requests ---------------------------------------------------------------------------------------------------------


def decode_request(request_id: bytes, header: bytes, body: bytes, meta: bytes) -> QueuedRequest:
    """A request from its Header, GenerateRequest and TokenizedPrompt.

    Raises:
        PoisonMessageError: one of them cannot be read.
    """
    try:
        head = common_pb2.Header.FromString(header)
        generate = requests_pb2.GenerateRequest.FromString(body)
        prompt = requests_pb2.TokenizedPrompt.FromString(meta)
        stopping = decode_stopping(generate.stopping)
        return QueuedRequest(
            request_id=request_id,
            prompt_token_ids=_u32(prompt.token_ids),
            n=_checked_samples(generate.n),
            sampling=decode_sampling(generate.sampling),
            stopping=dataclasses.replace(stopping, max_tokens=prompt.max_tokens or stopping.max_tokens),
            seed=head.seed,
            eos_token_ids=tuple(_u32(prompt.eos_token_ids).tolist()),
            priority=head.priority,
            tenant=head.tenant,
            arrival_ns=head.arrival_unix_ns,
            deadline_ns=head.deadline_unix_ns,
        )
    except (DecodeError, ValueError, PenstockError) as error:
        raise PoisonMessageError(f"not a tokenized request: {error}") from error


def num_samples(body: bytes) -> int:
    """How many sequences a request has whose other parts may be unreadable; 1 if this part cannot be right either."""
    try:
        generate = requests_pb2.GenerateRequest.FromString(body)
    except DecodeError:
        return 1
    return generate.n if 0 < generate.n <= MAX_N else 1


def _checked_samples(number: int) -> int:
    if number > MAX_N:
        raise ValueError(f"{number} samples")
    return max(1, number)


# --- workers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkerOffer:
    """What a worker says of itself when it registers."""

    model: str
    limits: WorkerLimits
    home_shard: int


def decode_worker_info(payload: bytes) -> WorkerOffer:
    """A WorkerInfo.

    Raises:
        PoisonMessageError: it cannot be read, or the worker cannot hold anything.
    """
    try:
        info = results_pb2.WorkerInfo.FromString(payload)
    except DecodeError as error:
        raise PoisonMessageError(f"not a WorkerInfo: {error}") from error
    if not (info.num_blocks and info.block_size and info.max_num_seqs and info.max_model_len):
        raise PoisonMessageError(f"a worker without blocks, slots or context: {info}".replace("\n", " "))
    limits = WorkerLimits(info.num_blocks, info.block_size, info.max_num_seqs, info.max_model_len)
    if info.max_num_batched_tokens:
        limits = WorkerLimits(
            info.num_blocks, info.block_size, info.max_num_seqs, info.max_model_len, info.max_num_batched_tokens
        )
    return WorkerOffer(info.model, limits, info.home_shard)


# --- plans ------------------------------------------------------------------------------------------------------------


def encode_plan(plan: StepPlan, session: bytes, incarnation: bytes, sent_ns: int) -> bytes:
    """A StepPlan of an epoch (scheduler session, worker incarnation)."""
    return steps_pb2.StepPlan(
        origin=common_pb2.Origin(session=session, sent_unix_ns=sent_ns),
        incarnation=incarnation,
        step=plan.step,
        released_slots=_packed(plan.released_slots),
        admissions=[_admission(admission) for admission in plan.admissions],
        append_slots=_packed(plan.append_slots),
        append_blocks=_packed(plan.append_blocks),
        replace_slots=_packed(plan.replace_slots),
        replace_indices=_packed(plan.replace_indices),
        replace_blocks=_packed(plan.replace_blocks),
        copy_sources=_packed(plan.copy_sources),
        copy_targets=_packed(plan.copy_targets),
        slots=_packed(plan.slots),
        num_tokens=_packed(plan.num_tokens),
    ).SerializeToString()


def _admission(admission: Admission) -> steps_pb2.Admission:
    masked = admission.stop_token_ids if admission.min_output_tokens else ()
    return steps_pb2.Admission(
        slot=admission.slot,
        token_ids=_packed(admission.token_ids),
        num_prompt_tokens=admission.num_prompt_tokens,
        num_computed_tokens=admission.num_computed_tokens,
        block_ids=_packed(admission.block_ids),
        sampling=encode_sampling(admission.sampling),
        seed=admission.seed,
        min_output_tokens=admission.min_output_tokens,
        stop_token_ids=_packed(np.array(masked, np.uint32)),
        request_id=admission.request_id,
    )


# --- results ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReceivedResult:
    """A StepResult with the epoch that it belongs to."""

    result: StepResult
    session: bytes  # of the scheduler whose plan it answers
    incarnation: bytes
    sent_ns: int
    error: RequestError | None  # the worker has ended the epoch


def decode_result(payload: bytes) -> ReceivedResult:
    """A StepResult.

    Raises:
        PoisonMessageError: it cannot be read, or its columns do not fit together.
    """
    try:
        message = results_pb2.StepResult.FromString(payload)
        counts = _u32(message.counts)
        result = StepResult(
            step=message.step,
            slots=_u32(message.slots),
            counts=counts,
            token_ids=_u32(message.token_ids),
            logprobs=_logprobs(message.logprobs, int(counts.sum())) if message.HasField("logprobs") else None,
            step_ns=message.step_ns,
            idle_ns=message.idle_ns,
        )
    except (DecodeError, ValueError) as error:
        raise PoisonMessageError(f"not a StepResult: {error}") from error
    failure = RequestError(_code(message.error.code), message.error.message, message.error.param)
    return ReceivedResult(
        result,
        message.scheduler_session,
        message.origin.session,
        message.origin.sent_unix_ns,
        failure if message.HasField("error") else None,
    )


# --- the log ----------------------------------------------------------------------------------------------------------


def encode_rows(rows: TokenRows, session: bytes, incarnation: bytes, step: int, sent_ns: int) -> bytes:
    """A TokenBatch; `incarnation` is empty and `step` 0 for rows outside a step."""
    error_rows = list(rows.errors)
    return tokens_pb2.TokenBatch(
        origin=common_pb2.Origin(session=session, sent_unix_ns=sent_ns),
        incarnation=incarnation,
        step=step,
        request_ids=b"".join(rows.request_ids),
        sequences=_packed(rows.sequences),
        positions=_packed(rows.positions),
        chains=rows.chains.astype("<u8", copy=False).tobytes(),
        counts=_packed(rows.counts),
        token_ids=_packed(rows.token_ids),
        finishes=rows.finishes.tobytes(),
        cached_tokens=_packed(rows.cached_tokens) if rows.cached_tokens.any() else b"",
        logprobs=None if rows.logprobs is None else _encode_logprobs(rows.logprobs),
        error_rows=_packed(np.array(error_rows, np.uint32)),
        errors=[_error(rows.errors[row]) for row in error_rows],
    ).SerializeToString()


def decode_rows(payload: bytes) -> TokenRows:
    """The rows of a TokenBatch.

    Raises:
        PoisonMessageError: it cannot be read, or its columns do not fit together.
    """
    try:
        message = tokens_pb2.TokenBatch.FromString(payload)
        ids = message.request_ids
        num_rows, rest = divmod(len(ids), REQUEST_ID_BYTES)
        counts, token_ids = _u32(message.counts), _u32(message.token_ids)
        cached = _u32(message.cached_tokens) if message.cached_tokens else np.zeros(num_rows, np.uint32)
        errors = [RequestError(_code(error.code), error.message, error.param) for error in message.errors]
        rows = TokenRows(
            request_ids=[ids[start : start + REQUEST_ID_BYTES] for start in range(0, len(ids), REQUEST_ID_BYTES)],
            sequences=_u32(message.sequences),
            positions=_u32(message.positions),
            chains=np.frombuffer(message.chains, "<u8").astype(np.uint64, copy=False),
            counts=counts,
            token_ids=token_ids,
            finishes=np.frombuffer(message.finishes, np.uint8),
            cached_tokens=cached,
            logprobs=_logprobs(message.logprobs, len(token_ids)) if message.HasField("logprobs") else None,
            errors=dict(zip(_u32(message.error_rows).tolist(), errors, strict=True)),
        )
    except (DecodeError, ValueError) as error:
        raise PoisonMessageError(f"not a TokenBatch: {error}") from error
    columns = (rows.sequences, rows.positions, rows.chains, counts, rows.finishes, cached)
    if rest or any(len(column) != num_rows for column in columns) or int(counts.sum()) != len(token_ids):
        raise PoisonMessageError("not a TokenBatch: columns of different lengths")
    return rows


def decode_witness(witness: Iterable[bytes]) -> list[U32]:
    """The tokens that a client has, u32[tokens] for each sequence.

    Raises:
        PoisonMessageError: they cannot be read.
    """
    try:
        return [_u32(each) for each in witness]
    except ValueError as error:
        raise PoisonMessageError(f"not tokens: {error}") from error


def read_histories(payloads: Iterable[bytes], wanted: Mapping[bytes, int]) -> dict[bytes, list[History]]:
    """The histories of the sequences of `wanted` (request id → how many), from TokenBatches in order: checkpoints, log.

    A row counts only if position and chain extend what came before; a batch that cannot be read is passed over, as a
    gap is: what lies behind it is generated again.
    """
    histories = {request_id: [History() for _ in range(number)] for request_id, number in wanted.items()}
    for payload in payloads:
        try:
            rows = decode_rows(payload)
        except PoisonMessageError:
            continue
        ends = np.cumsum(rows.counts, dtype=np.int64)
        columns = (rows.sequences, rows.positions, rows.chains, rows.finishes, ends - rows.counts, ends)
        for request_id, *row in zip(rows.request_ids, *(column.tolist() for column in columns), strict=True):
            of_request = histories.get(request_id)
            if of_request is not None and row[0] < len(of_request):
                of_request[row[0]].take(*row[1:4], rows.token_ids[row[4] : row[5]])
    return histories


def unstarted_rows(request_id: bytes, num_sequences: int, error: RequestError | None) -> TokenRows:
    """Rows that end all sequences of a request before their first token; without an error they are cancelled."""
    return TokenRows(
        request_ids=[request_id] * num_sequences,
        sequences=np.arange(num_sequences, dtype=np.uint32),
        positions=np.zeros(num_sequences, np.uint32),
        chains=np.full(num_sequences, chain.CHAIN_START, np.uint64),
        counts=np.zeros(num_sequences, np.uint32),
        token_ids=np.empty(0, np.uint32),
        finishes=np.full(num_sequences, FinishReason.ERROR if error else FinishReason.CANCELLED, np.uint8),
        cached_tokens=np.zeros(num_sequences, np.uint32),
        errors=dict.fromkeys(range(num_sequences), error) if error else {},
    )


# --- columns ----------------------------------------------------------------------------------------------------------


def _packed(column: U32) -> bytes:
    return column.astype("<u4", copy=False).tobytes()


def _u32(packed: bytes) -> U32:
    return np.frombuffer(packed, "<u4").astype(np.uint32, copy=False)


def _f32(packed: bytes) -> F32:
    return np.frombuffer(packed, "<f4").astype(np.float32, copy=False)


def _logprobs(message: common_pb2.LogprobColumns, num_tokens: int) -> Logprobs:
    logprobs = Logprobs(
        _f32(message.sampled), _u32(message.top_counts), _u32(message.top_ids), _f32(message.top_logprobs)
    )
    num_tops = int(logprobs.top_counts.sum())
    if len(logprobs.sampled) != num_tokens or len(logprobs.top_counts) != num_tokens:
        raise ValueError(f"logprobs of {len(logprobs.sampled)} tokens for {num_tokens}")
    if len(logprobs.top_ids) != num_tops or len(logprobs.top_logprobs) != num_tops:
        raise ValueError(f"logprobs of {len(logprobs.top_ids)} alternatives for {num_tops}")
    return logprobs


def _encode_logprobs(logprobs: Logprobs) -> common_pb2.LogprobColumns:
    def floats(column: npt.NDArray[np.float32]) -> bytes:
        return column.astype("<f4", copy=False).tobytes()

    return common_pb2.LogprobColumns(
        sampled=floats(logprobs.sampled),
        top_counts=_packed(logprobs.top_counts),
        top_ids=_packed(logprobs.top_ids),
        top_logprobs=floats(logprobs.top_logprobs),
    )


def _error(error: RequestError) -> common_pb2.Error:
    code = common_pb2.ErrorCode.ValueType(error.code)
    return common_pb2.Error(code=code, message=error.message, param=error.param)


def _code(number: int) -> ErrorCode:
    """A code that this version does not know counts as INTERNAL."""
    return ErrorCode(number) if number in _CODES else ErrorCode.INTERNAL
