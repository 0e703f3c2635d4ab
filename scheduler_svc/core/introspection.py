"""Answers to an operator's questions about single requests."""

from collections.abc import Mapping
from dataclasses import dataclass

from scheduler_svc.core.sequence import ScheduledRequest, SequenceState
from scheduler_svc.core.tables import held_blocks
from scheduler_svc.core.worker import WorkerState


@dataclass(frozen=True, slots=True)
class SequenceInfo:
    """One sequence as an operator sees it."""

    sequence: int
    status: str
    worker_id: str  # empty while it does not run
    slot: int  # -1 while it does not run
    num_tokens: int  # prompt and output tokens known
    num_computed_tokens: int  # planned
    block_ids: tuple[int, ...]  # of all kinds of layers, one kind after the other
    block_counts: tuple[int, ...]  # by kind: how many of these
    first_blocks: tuple[int, ...]  # by kind: how many stood before these and are given up
    ref_counts: tuple[int, ...]  # of each block: how many sequences hold it


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """One request as an operator sees it."""

    request_id: bytes  # 16 bytes
    tenant: str
    priority: int
    arrival_ns: int  # Unix time, nanoseconds
    num_prompt_tokens: int
    num_output_tokens: int  # over all sequences
    num_preemptions: int  # of its sequences
    sequences: tuple[SequenceInfo, ...]


def describe_sequences(request: ScheduledRequest, workers: Mapping[str, WorkerState]) -> tuple[SequenceInfo, ...]:
    """All sequences of a request."""
    return tuple(_describe(sequence, workers.get(sequence.worker_id)) for sequence in request.sequences)


def describe_request(request: ScheduledRequest, workers: Mapping[str, WorkerState]) -> RequestInfo:
    """A request and all its sequences."""
    return RequestInfo(
        request_id=request.request_id,
        tenant=request.queued.tenant,
        priority=request.queued.priority,
        arrival_ns=request.queued.arrival_ns,
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=sum(len(sequence.output) for sequence in request.sequences),
        num_preemptions=request.num_preemptions,
        sequences=describe_sequences(request, workers),
    )


def _describe(sequence: SequenceState, worker: WorkerState | None) -> SequenceInfo:
    blocks = held_blocks(sequence.tables)
    return SequenceInfo(
        sequence=sequence.index,
        status=sequence.status.name.lower(),
        worker_id=sequence.worker_id,
        slot=sequence.slot,
        num_tokens=sequence.num_tokens,
        num_computed_tokens=int(worker.num_computed_tokens[sequence.slot]) if worker else 0,
        block_ids=tuple(blocks),
        block_counts=tuple(len(table.blocks) for table in sequence.tables),
        first_blocks=tuple(table.first for table in sequence.tables),
        ref_counts=tuple(worker.blocks.ref_counts[block] for block in blocks) if worker else (),
    )
