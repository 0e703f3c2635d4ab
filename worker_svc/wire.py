"""Protobuf to domain and back: plans, results, and what a worker says of itself."""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from google.protobuf.message import DecodeError

from contract.domain.errors import PenstockError, PoisonMessageError
from contract.domain.finish import RequestError
from contract.domain.plan import NO_TOKENS, U32, Admission, StepPlan, StepResult
from contract.v1 import results_pb2, steps_pb2, worker_pb2
from contract.wire.model_kind import encode_model_kind
from contract.wire.pooling import decode_pooling, encode_vector
from contract.wire.requests import decode_sampling
from contract.wire.tokens import encode_error, encode_logprobs, encode_prompt_logprobs
from servicekit.status import ServiceStatus
from worker_svc.core.interface import Limits
from worker_svc.core.memory import MemoryProfile

WorkerInfo: TypeAlias = results_pb2.WorkerInfo  # what a worker registers

_ID_BYTES = 16


@dataclass(frozen=True, slots=True)
class ReceivedPlan:
    """A plan and whom it is from and for."""

    session: bytes  # of the scheduler
    incarnation: bytes
    sent_unix_ns: int
    plan: StepPlan


def decode_plan(payload: bytes) -> ReceivedPlan:
    """A penstock.v1.StepPlan.

    Raises:
        PoisonMessageError: not one, or its columns do not fit together.
    """
    try:
        message = steps_pb2.StepPlan.FromString(payload)
    except DecodeError as error:
        raise PoisonMessageError(f"not a StepPlan: {error}") from error
    session, incarnation = message.origin.session, message.incarnation
    if len(session) != _ID_BYTES or len(incarnation) != _ID_BYTES or message.step == 0:
        raise PoisonMessageError("a StepPlan without a session, an incarnation or a step")
    append_slots, append_blocks = _columns("append", message.append_slots, message.append_blocks)
    append_kinds = _column("append_kinds", message.append_kinds)
    if len(append_kinds):
        _columns("append", message.append_kinds, message.append_slots)
    copy_sources, copy_targets = _columns("copy", message.copy_sources, message.copy_targets)
    slots, num_tokens = _columns("slots", message.slots, message.num_tokens)
    save_slots, save_states = _columns("save", message.save_slots, message.save_states)
    plan = StepPlan(
        step=message.step,
        released_slots=_column("released_slots", message.released_slots),
        admissions=tuple(_admission(admission) for admission in message.admissions),
        append_slots=append_slots,
        append_blocks=append_blocks,
        append_kinds=append_kinds,
        copy_sources=copy_sources,
        copy_targets=copy_targets,
        slots=slots,
        num_tokens=num_tokens,
        save_slots=save_slots,
        save_states=save_states,
    )
    return ReceivedPlan(session, incarnation, message.origin.sent_unix_ns, plan)


def encode_result(result: StepResult, session: bytes, incarnation: bytes, now_unix_ns: int, slack_ns: int = 0) -> bytes:
    """A penstock.v1.StepResult that answers a plan of the scheduler's `session`; see there for `slack_ns`."""
    message = _answer(result.step, session, incarnation, now_unix_ns)
    message.slots = _bytes(result.slots)
    message.counts = _bytes(result.counts)
    message.token_ids = _bytes(result.token_ids)
    message.step_ns = result.step_ns
    message.idle_ns = result.idle_ns
    message.slack_ns = slack_ns
    for slot, why in result.failures.items():
        message.failures.add(slot=slot, message=why)
    if result.logprobs is not None:
        message.logprobs.CopyFrom(encode_logprobs(result.logprobs))
    return message.SerializeToString()


def encode_prompts(result: StepResult) -> dict[bytes, bytes]:
    """By request, what is kept of prompts: a penstock.v1.PromptLogprobs or a penstock.v1.PromptVector of each."""
    logprobs = {each: encode_prompt_logprobs(prompt).SerializeToString() for each, prompt in result.prompts.items()}
    return logprobs | {each: encode_vector(vector) for each, vector in result.vectors.items()}


def encode_failure(step: int, error: PenstockError, session: bytes, incarnation: bytes, now_unix_ns: int) -> bytes:
    """A penstock.v1.StepResult that says that the epoch is over."""
    message = _answer(step, session, incarnation, now_unix_ns)
    message.error.CopyFrom(encode_error(RequestError.of(error)))
    return message.SerializeToString()


def worker_info(
    limits: Limits, *, model: str, home_shard: int | None, world_size: int, device: str, model_digest: bytes
) -> WorkerInfo:
    """The facts that a worker registers."""
    return WorkerInfo(
        model=model,
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
        max_num_seqs=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        home_shard=home_shard,
        world_size=world_size,
        device=device,
        model_digest=model_digest,
        kinds=[
            results_pb2.KVKind(block_size=each.block_size, window=each.reach.window, chunk=each.reach.chunk)
            for each in limits.kinds
        ],
        has_state=limits.has_state,
        num_saved_states=limits.num_saved_states,
        kind=encode_model_kind(limits.model_kind),
    )


def worker_status(
    service: ServiceStatus, info: WorkerInfo, *, incarnation: bytes, step: int, plans_queued: int
) -> worker_pb2.WorkerStatus:
    """A penstock.v1.WorkerStatus."""
    return worker_pb2.WorkerStatus(
        service=service, info=info, incarnation=incarnation, step=step, plans_queued=plans_queued
    )


def memory_profile(profile: MemoryProfile) -> worker_pb2.MemoryProfile:
    """A penstock.v1.MemoryProfile."""
    return worker_pb2.MemoryProfile(
        total_bytes=profile.total_bytes,
        weights_bytes=profile.weights_bytes,
        peak_activation_bytes=profile.activation_bytes,
        kv_cache_bytes=profile.kv_cache_bytes,
        block_bytes=profile.block_bytes,
        num_blocks=profile.num_blocks,
        graph_bytes=profile.graph_bytes,
    )


def _answer(step: int, session: bytes, incarnation: bytes, now_unix_ns: int) -> results_pb2.StepResult:
    message = results_pb2.StepResult(scheduler_session=session, step=step)
    message.origin.session = incarnation
    message.origin.sent_unix_ns = now_unix_ns
    return message


def _admission(message: steps_pb2.Admission) -> Admission:
    try:
        sampling = decode_sampling(message.sampling)
    except PenstockError as error:
        raise PoisonMessageError(error.message) from error
    block_ids = _column("block_ids", message.block_ids)
    block_counts, first_blocks = _columns("kinds", message.block_counts, message.first_blocks)
    if len(block_counts) and int(block_counts.sum()) != len(block_ids):
        raise PoisonMessageError(f"{len(block_ids)} blocks for a sequence, of its kinds {block_counts.tolist()}")
    return Admission(
        slot=message.slot,
        token_ids=_column("token_ids", message.token_ids),
        num_prompt_tokens=message.num_prompt_tokens,
        num_computed_tokens=message.num_computed_tokens,
        block_ids=block_ids,
        sampling=sampling,
        seed=message.seed,
        min_output_tokens=message.min_output_tokens,
        stop_token_ids=tuple(_column("stop_token_ids", message.stop_token_ids).tolist()),
        request_id=message.request_id,
        eos_token_ids=tuple(_column("eos_token_ids", message.eos_token_ids).tolist()),
        prompt_logprobs=message.prompt_logprobs,
        num_first_tokens=message.num_first_tokens,
        pooling=decode_pooling(message.pooling) if message.HasField("pooling") else None,
        block_counts=block_counts,
        first_blocks=first_blocks,
        source_state=message.source_state if message.HasField("source_state") else None,
    )


def _column(name: str, data: bytes) -> U32:
    if not data:
        return NO_TOKENS
    if len(data) % 4:
        raise PoisonMessageError(f"the column {name} has {len(data)} bytes, not a multiple of four")
    return np.frombuffer(data, "<u4")


def _columns(name: str, *data: bytes) -> tuple[U32, ...]:
    if not any(data):  # as nearly always
        return (NO_TOKENS,) * len(data)
    columns = tuple(_column(name, each) for each in data)
    if len(set(map(len, columns))) > 1:
        raise PoisonMessageError(f"the columns {name} have different lengths: {[len(column) for column in columns]}")
    return columns


def _bytes(column: U32) -> bytes:
    return column.astype("<u4", copy=False).tobytes()
