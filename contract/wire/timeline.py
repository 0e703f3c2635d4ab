"""A request's timeline as protobuf and back."""

from contract.domain.timeline import Computed, Run, Start, StartReason, Timeline
from contract.v1 import common_pb2

_REASONS = frozenset(StartReason)


def encode_timeline(timeline: Timeline) -> common_pb2.Timeline:
    """A penstock.v1.Timeline."""
    return common_pb2.Timeline(
        tokenizing_unix_ns=timeline.tokenizing_ns,
        tokenized_unix_ns=timeline.tokenized_ns,
        opened_unix_ns=timeline.opened_ns,
        runs=[_encode_run(run) for run in timeline.runs],
        num_more_runs=timeline.num_more_runs,
        finished_unix_ns=timeline.finished_ns,
        retired_unix_ns=timeline.retired_ns,
    )


def decode_timeline(message: common_pb2.Timeline) -> Timeline:
    """The inverse of `encode_timeline`."""
    return Timeline(
        tokenizing_ns=message.tokenizing_unix_ns,
        tokenized_ns=message.tokenized_unix_ns,
        opened_ns=message.opened_unix_ns,
        runs=[_decode_run(run) for run in message.runs],
        num_more_runs=message.num_more_runs,
        finished_ns=message.finished_unix_ns,
        retired_ns=message.retired_unix_ns,
    )


def start_reason(number: int) -> StartReason:
    """A reason as it travels; one that this version does not know counts as FIRST."""
    return StartReason(number) if number in _REASONS else StartReason.FIRST


def _encode_run(run: Run) -> common_pb2.Run:
    return common_pb2.Run(
        sequence=run.sequence,
        position=run.position,
        admitted_unix_ns=run.start.at_ns,
        produced_unix_ns=run.computed.sent_ns,
        worker=run.computed.worker,
        incarnation=run.computed.incarnation,
        step=run.computed.step,
        reason=common_pb2.StartReason.ValueType(run.start.reason),
    )


def _decode_run(message: common_pb2.Run) -> Run:
    return Run(
        message.sequence,
        message.position,
        Start(message.admitted_unix_ns, start_reason(message.reason)),
        Computed(message.worker, message.incarnation, message.step, message.produced_unix_ns),
    )
