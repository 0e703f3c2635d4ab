"""Protobuf to domain and back: requests, plans, results and the rows of the log."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
from google.protobuf.message import DecodeError

from contract.domain.errors import PenstockError, PoisonMessageError
from contract.domain.finish import CancelReason, RequestError
from contract.domain.kv_kinds import KVKind, Reach
from contract.domain.logprob_records import unpack_records
from contract.domain.params import MAX_N, Sampling
from contract.domain.plan import U32, Admission, Logprobs, StepPlan, StepResult
from contract.domain.rows import TokenRows
from contract.domain.timeline import Computed
from contract.v1 import common_pb2, requests_pb2, results_pb2, status_pb2, steps_pb2
from contract.wire import tokens
from contract.wire.beams import decode_beams
from contract.wire.model_kind import decode_model_kind
from contract.wire.pooling import decode_pooling, encode_pooling
from contract.wire.requests import decode_sampling, decode_stopping, encode_sampling
from scheduler_svc.core.history import History
from scheduler_svc.core.limits import WorkerLimits
from scheduler_svc.core.sequence import QueuedRequest
from scheduler_svc.core.stats import WorkerStats
from servicekit.bus import keys
from servicekit.bus.calls import Loaded, StoredRequest, WorkerEntry

# --- requests ---------------------------------------------------------------------------------------------------------


def decode_request(request_id: bytes, header: bytes, body: bytes, meta: bytes, token_ids: bytes) -> QueuedRequest:
    """A request from its Header, GenerateRequest, TokenizedPrompt and token ids.

    Raises:
        PoisonMessageError: one of them cannot be read.
    """
    try:
        head = common_pb2.Header.FromString(header)
        generate = requests_pb2.GenerateRequest.FromString(body)
        prompt = requests_pb2.TokenizedPrompt.FromString(meta)
        prompt_token_ids = _u32(token_ids)
        if len(prompt_token_ids) != prompt.num_tokens:
            raise ValueError(f"{len(prompt_token_ids)} token ids of {prompt.num_tokens}")  # noqa: TRY301
        stopping = decode_stopping(generate.stopping)
        if prompt.max_tokens and prompt.max_tokens != stopping.max_tokens:
            stopping = dataclasses.replace(stopping, max_tokens=prompt.max_tokens)
        generate.sampling.MergeFrom(prompt.made)
        return QueuedRequest(
            request_id=request_id,
            prompt_token_ids=prompt_token_ids,
            n=_checked_samples(generate.n),
            sampling=decode_sampling(generate.sampling),
            stopping=stopping,
            seed=head.seed,
            eos_token_ids=tuple(_u32(prompt.eos_token_ids).tolist()),
            priority=head.priority,
            tenant=head.tenant,
            arrival_ns=head.arrival_unix_ns,
            deadline_ns=head.deadline_unix_ns,
            cache_salt=generate.cache_salt,
            pooling=decode_pooling(generate.pooling) if generate.HasField("pooling") else None,
            num_first_tokens=prompt.num_first_tokens,
            beams=decode_beams(generate.beams) if generate.HasField("beams") else None,
        )
    except (DecodeError, ValueError, PenstockError) as error:
        raise PoisonMessageError(f"not a tokenized request: {error}") from error


def num_samples(body: bytes) -> int:
    """The number of sequences of a request whose other parts may be unreadable; 1 if this part is wrong, too."""
    try:
        generate = requests_pb2.GenerateRequest.FromString(body)
    except DecodeError:
        return 1
    return generate.n if 0 < generate.n <= MAX_N else 1


def num_histories(body: bytes) -> int:
    """The number of sequences of a request in the log: its samples and, after them, the search of its beams."""
    try:
        has_search = requests_pb2.GenerateRequest.FromString(body).HasField("beams")
    except DecodeError:
        has_search = False
    return num_samples(body) + has_search


def _checked_samples(number: int) -> int:
    if number > MAX_N:
        raise ValueError(f"{number} samples")
    return max(1, number)


# --- workers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkerOffer:
    """The facts that a worker tells when it registers."""

    model: str
    limits: WorkerLimits
    home_shard: int | None  # None: its scheduler chooses
    model_digest: bytes = b""


@lru_cache(1024)
def decode_worker_info(payload: bytes) -> WorkerOffer:
    """A WorkerInfo.

    Raises:
        PoisonMessageError: it cannot be read, or the worker cannot hold anything.
    """
    try:
        info = results_pb2.WorkerInfo.FromString(payload)
    except DecodeError as error:
        raise PoisonMessageError(f"not a WorkerInfo: {error}") from error
    kind = decode_model_kind(info.kind)
    has_blocks = info.num_blocks > 0 or kind.computes_whole_prompts
    if not (has_blocks and info.block_size and info.max_num_seqs and info.max_model_len):
        raise PoisonMessageError(f"a worker without blocks, slots or context: {info}".replace("\n", " "))
    if info.num_saved_states and (not info.has_state or kind.computes_whole_prompts):
        raise PoisonMessageError(f"a worker that saves states of layers that keep none: {info}".replace("\n", " "))
    limits = WorkerLimits(
        info.num_blocks,
        info.block_size,
        info.max_num_seqs,
        info.max_model_len,
        kinds=_kinds(info),
        has_state=info.has_state,
        num_saved_states=info.num_saved_states,
        model_kind=kind,
    )
    if info.max_num_batched_tokens:
        limits = dataclasses.replace(limits, max_num_batched_tokens=info.max_num_batched_tokens)
    home_shard = info.home_shard if info.HasField("home_shard") else None
    return WorkerOffer(info.model, limits, home_shard, info.model_digest)


def _kinds(info: results_pb2.WorkerInfo) -> tuple[KVKind, ...]:
    kinds = tuple(KVKind(each.block_size, _reach(each)) for each in info.kinds)
    sizes = sorted(each.block_size for each in kinds)
    are_multiples = all(smaller and not larger % smaller for smaller, larger in pairwise(sizes))
    are_seen = all(each.reach.longest != 0 for each in kinds)
    if kinds and not (sizes[0] == info.block_size and are_multiples and are_seen):
        raise PoisonMessageError(f"a worker whose kinds of layers do not fit together: {info}".replace("\n", " "))
    return kinds


def _reach(kind: results_pb2.KVKind) -> Reach:
    window = kind.window if kind.HasField("window") else None
    return Reach(window, kind.chunk if kind.HasField("chunk") else None)


def model_digest_of(worker: WorkerEntry) -> bytes | None:
    """The digest of a worker's model; None: what it says of itself cannot be read."""
    try:
        return decode_worker_info(worker.info).model_digest
    except PoisonMessageError:
        return None


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
        append_kinds=_packed(plan.append_kinds),
        copy_sources=_packed(plan.copy_sources),
        copy_targets=_packed(plan.copy_targets),
        slots=_packed(plan.slots),
        num_tokens=_packed(plan.num_tokens),
        save_slots=_packed(plan.save_slots),
        save_states=_packed(plan.save_states),
    ).SerializeToString()


@lru_cache(64)
def _sampling(sampling: Sampling) -> requests_pb2.SamplingParameters:
    """Those of most requests are the same. Only to be copied into a message."""
    return encode_sampling(sampling)


def _admission(admission: Admission) -> steps_pb2.Admission:
    masked = admission.stop_token_ids if admission.min_output_tokens else ()
    return steps_pb2.Admission(
        slot=admission.slot,
        token_ids=_packed(admission.token_ids),
        num_prompt_tokens=admission.num_prompt_tokens,
        num_computed_tokens=admission.num_computed_tokens,
        block_ids=_packed(admission.block_ids),
        sampling=_sampling(admission.sampling),
        seed=admission.seed,
        min_output_tokens=admission.min_output_tokens,
        stop_token_ids=_packed(np.array(masked, np.uint32)),
        request_id=admission.request_id,
        eos_token_ids=_packed(np.array(admission.eos_token_ids, np.uint32)),
        prompt_logprobs=admission.prompt_logprobs,
        pooling=encode_pooling(admission.pooling),
        num_first_tokens=admission.num_first_tokens,
        block_counts=_packed(admission.block_counts),
        first_blocks=_packed(admission.first_blocks),
        source_state=admission.source_state,
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
    slack_ns: int  # for so long the plan had been ready for the device when the step before it ended; see the contract


def decode_result(payload: bytes) -> ReceivedResult:
    """A StepResult.

    Raises:
        PoisonMessageError: it cannot be read, or its columns do not fit together.
    """
    try:
        message = results_pb2.StepResult.FromString(payload)
        counts, logprobs = _u32(message.counts), None
        if message.HasField("logprobs"):
            logprobs = tokens.decode_logprobs(message.logprobs, int(counts.sum()))
        result = StepResult(
            step=message.step,
            slots=_u32(message.slots),
            counts=counts,
            token_ids=_u32(message.token_ids),
            logprobs=logprobs,
            step_ns=message.step_ns,
            idle_ns=message.idle_ns,
            failures={each.slot: each.message for each in message.failures},
        )
    except (DecodeError, ValueError) as error:
        raise PoisonMessageError(f"not a StepResult: {error}") from error
    return ReceivedResult(
        result,
        message.scheduler_session,
        message.origin.session,
        message.origin.sent_unix_ns,
        tokens.decode_error(message.error) if message.HasField("error") else None,
        message.slack_ns,
    )


# --- the log ----------------------------------------------------------------------------------------------------------


def encode_rows(rows: TokenRows, session: bytes, computed: Computed) -> bytes:
    """A TokenBatch; of rows outside a step only the time of sending is told."""
    return tokens.encode_rows(rows, session, computed)


def decode_rows(payload: bytes) -> TokenRows:
    """The rows of a TokenBatch.

    Raises:
        PoisonMessageError: it cannot be read, or its columns do not fit together.
    """
    return tokens.decode_rows(payload)[1]


def decode_cancel(fields: Mapping[bytes, bytes]) -> tuple[bytes, CancelReason, int | None]:
    """Of an entry: the request, why it is cancelled, and which of its sequences; None: all.

    Raises:
        PoisonMessageError: it is no cancel.
    """
    try:
        sequence = int(fields.get(keys.SEQUENCE, b"-1"))
        return fields[keys.REQUEST], CancelReason(int(fields[keys.REASON])), sequence if sequence >= 0 else None
    except (KeyError, ValueError) as error:
        raise PoisonMessageError(f"not a cancel: {error!r}") from error


def decode_witness(witness: Sequence[bytes], num_sequences: int) -> tuple[list[U32], list[Logprobs | None]]:
    """The tokens that a client has, u32[tokens] for each sequence, and the logprobs that it was told of them.

    Raises:
        PoisonMessageError: they cannot be read.
    """
    try:
        tokens = [_u32(each) for each in witness[:num_sequences]]
        records = witness[num_sequences:]
        return tokens, [unpack_records(each) if each else None for each in records]
    except ValueError as error:
        raise PoisonMessageError(f"not what a client has: {error}") from error


def read_histories(payloads: Iterable[bytes], wanted: Mapping[bytes, int]) -> dict[bytes, list[History]]:
    """The histories of the sequences of `wanted` (request id → how many), from TokenBatches in order: checkpoints, log.

    A row counts only if position and chain extend what came before; a batch that cannot be read is passed over, as a
    gap is: what lies after it is generated again.
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
                of_request[row[0]].take(*row[1:4], rows.token_ids[row[4] : row[5]], rows.model_digest)
    return histories


def read_loaded(loaded: Loaded) -> list[tuple[StoredRequest, list[History]]]:
    """The loaded requests that go on, with the histories of their sequences by checkpoints and log."""
    entries = [entry for log in loaded.log.values() for entry in log]
    logged = [entry.fields[keys.PAYLOAD] for entry in entries if keys.PAYLOAD in entry.fields]
    wanted = {request.request_id: num_histories(request.body) for request in loaded.requests}
    histories = read_histories([*loaded.checkpoints.values(), *logged], wanted)
    found = [(request, histories[request.request_id]) for request in loaded.requests]
    return [each for each in found if not all(history.has_ended for history in each[1][: num_samples(each[0].body)])]


# --- status -----------------------------------------------------------------------------------------------------------


def block_map(worker: str, stats: WorkerStats) -> status_pb2.BlockMap:
    """The blocks of a worker, for who draws them."""
    shares = stats.block_shares
    return status_pb2.BlockMap(
        worker=worker,
        num_blocks=stats.num_blocks,
        group_size=shares.group_size,
        used=shares.used,
        cached=shares.cached,
    )


# --- columns ----------------------------------------------------------------------------------------------------------


def _packed(column: U32) -> bytes:
    return column.astype("<u4", copy=False).tobytes() if len(column) else b""  # most columns of a plan are empty


def _u32(packed: bytes) -> U32:
    return np.frombuffer(packed, "<u4").astype(np.uint32, copy=False)
