"""What the scheduler reads is what gateway, tokenizer and worker wrote; worker and detokenizer read what it writes."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.domain import chain
from contract.domain.errors import ErrorCode, PoisonMessageError
from contract.domain.finish import FinishReason, RequestError
from contract.domain.params import Made, Sampling, SamplingParams, Stopping
from contract.domain.plan import Admission, Logprobs, StepPlan, StepResult
from contract.domain.request import Header, Prompt, Request
from contract.domain.rows import TokenRows, unstarted_rows
from contract.domain.timeline import Computed
from contract.v1 import requests_pb2, results_pb2, steps_pb2
from contract.wire.requests import encode_made
from detokenizer_svc.wire import decode_tokens
from gateway_svc.wire import encode_header, encode_request
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.rows import NO_ROWS, select_rows
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.wire import (
    decode_request,
    decode_result,
    decode_rows,
    decode_worker_info,
    encode_plan,
    encode_rows,
    num_samples,
    read_histories,
)
from worker_svc.core.interface import Limits
from worker_svc.wire import decode_plan, encode_failure, encode_result, worker_info

SESSION, INCARNATION = b"s" * 16, b"i" * 16
U32 = st.integers(0, 2**32 - 1)
F32 = st.floats(width=32, allow_nan=False)


def column(values: Any, dtype: Any = np.uint32) -> Any:
    return np.array(values, dtype)


def same(one: object, two: object) -> None:
    """Equal in every field; arrays by value."""
    if dataclasses.is_dataclass(one):
        assert type(one) is type(two)
        for each in dataclasses.fields(one):
            same(getattr(one, each.name), getattr(two, each.name))
    elif isinstance(one, tuple):
        assert isinstance(two, tuple)
        assert len(one) == len(two)
        for left, right in zip(one, two, strict=True):
            same(left, right)
    elif isinstance(one, np.ndarray):
        np.testing.assert_array_equal(one, two)
    else:
        assert one == two


columns = st.lists(U32, max_size=5).map(column)
pairs = st.lists(st.tuples(U32, U32), max_size=4).map(
    lambda found: tuple(column([pair[i] for pair in found]) for i in range(2))
)
samplings = st.builds(
    Sampling,
    temperature=F32,
    top_k=U32,
    top_p=F32,
    min_p=F32,
    repetition_penalty=F32,
    presence_penalty=F32,
    frequency_penalty=F32,
    logit_bias=st.lists(st.tuples(U32, F32), max_size=3).map(tuple),
    num_logprobs=st.none() | st.integers(0, 20),
    suppress_token_ids=st.lists(U32, max_size=3).map(tuple),
    bad_word_ids=st.lists(st.lists(U32, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
    allowed_token_ids=st.none() | st.lists(U32, min_size=1, max_size=3).map(tuple),
)
admissions = st.builds(
    Admission,
    slot=U32,
    token_ids=columns,
    num_prompt_tokens=U32,
    num_computed_tokens=U32,
    block_ids=columns,
    sampling=samplings,
    seed=st.integers(0, 2**64 - 1),
    min_output_tokens=st.integers(1, 2**32 - 1),
    stop_token_ids=st.lists(U32, max_size=3).map(tuple),
    request_id=st.binary(max_size=16),
)


@given(
    st.integers(1, 2**63),
    columns,
    st.lists(admissions, max_size=3).map(tuple),
    st.lists(pairs, min_size=3, max_size=3),
)
def test_a_plan_is_read_by_the_worker_as_it_was_made(
    step: int, released: Any, admitted: tuple[Admission, ...], found: list[Any]
) -> None:
    plan = StepPlan(
        step=step,
        released_slots=released,
        admissions=admitted,
        append_slots=found[0][0],
        append_blocks=found[0][1],
        copy_sources=found[1][0],
        copy_targets=found[1][1],
        slots=found[2][0],
        num_tokens=found[2][1],
    )
    received = decode_plan(encode_plan(plan, SESSION, INCARNATION, 7))
    assert (received.session, received.incarnation, received.sent_unix_ns) == (SESSION, INCARNATION, 7)
    same(received.plan, plan)


def test_stop_ids_travel_only_where_the_worker_must_mask_them() -> None:
    admission = Admission(0, column([1]), 1, 0, column([0]), Sampling(), 0, 0, (5, 6))
    payload = encode_plan(StepPlan(1, admissions=(admission,)), SESSION, INCARNATION, 0)
    assert steps_pb2.StepPlan.FromString(payload).admissions[0].stop_token_ids == b""


@st.composite
def logprobs(draw: st.DrawFn, num_tokens: int) -> Logprobs:
    counts = draw(st.lists(st.integers(0, 3), min_size=num_tokens, max_size=num_tokens))
    num_tops = sum(counts)
    floats = st.floats(max_value=0, width=32, allow_nan=False)
    return Logprobs(
        column(draw(st.lists(floats, min_size=num_tokens, max_size=num_tokens)), np.float32),
        column(draw(st.lists(U32, min_size=num_tokens, max_size=num_tokens))),
        column(counts),
        column(draw(st.lists(U32, min_size=num_tops, max_size=num_tops))),
        column(draw(st.lists(floats, min_size=num_tops, max_size=num_tops)), np.float32),
    )


@st.composite
def results(draw: st.DrawFn) -> StepResult:
    counts = draw(st.lists(st.integers(0, 3), max_size=5))
    num_tokens = sum(counts)
    return StepResult(
        step=draw(st.integers(1, 2**63)),
        slots=column(draw(st.lists(U32, min_size=len(counts), max_size=len(counts)))),
        counts=column(counts),
        token_ids=column(draw(st.lists(U32, min_size=num_tokens, max_size=num_tokens))),
        logprobs=draw(st.none() | logprobs(num_tokens)),
        step_ns=draw(U32),
        idle_ns=draw(U32),
    )


@given(results())
def test_a_result_is_read_as_the_worker_made_it(result: StepResult) -> None:
    received = decode_result(encode_result(result, SESSION, INCARNATION, 9))
    assert (received.session, received.incarnation, received.sent_ns) == (SESSION, INCARNATION, 9)
    assert received.error is None
    same(received.result, result)


def test_a_worker_that_fails_says_so() -> None:
    error = RequestError(ErrorCode.INTERNAL, "the device is gone")
    received = decode_result(encode_failure(3, error.raised(), SESSION, INCARNATION, 9))
    assert received.error == error


@pytest.mark.parametrize(
    "message",
    [
        results_pb2.StepResult(step=1, slots=b"abc"),
        results_pb2.StepResult(
            step=1, slots=b"\0" * 4, counts=b"\1\0\0\0", token_ids=b"\0" * 4, logprobs={"sampled": b"\0" * 8}
        ),
        results_pb2.StepResult(
            step=1,
            slots=b"\0" * 4,
            counts=b"\1\0\0\0",
            token_ids=b"\0" * 4,
            logprobs={"sampled": b"\0" * 4, "ranks": b"\0" * 4, "top_counts": b"\1\0\0\0"},
        ),
    ],
)
def test_results_whose_columns_do_not_fit_are_poison(message: results_pb2.StepResult) -> None:
    with pytest.raises(PoisonMessageError, match="not a StepResult"):
        decode_result(message.SerializeToString())


@pytest.mark.parametrize("decode", [decode_result, decode_rows, decode_worker_info])
def test_bytes_that_are_no_message_are_poison(decode: Any) -> None:
    with pytest.raises(PoisonMessageError):
        decode(b"\xff\xff")


@st.composite
def token_rows(draw: st.DrawFn) -> TokenRows:
    counts = draw(st.lists(st.integers(0, 3), max_size=6))
    num_rows, num_tokens = len(counts), sum(counts)
    finishes = [draw(st.sampled_from(FinishReason if count == 0 else [FinishReason(0)])) for count in counts]
    finishes = [
        finish or FinishReason.STOP if count == 0 else finish for count, finish in zip(counts, finishes, strict=True)
    ]

    def drawn(values: Any, dtype: Any = np.uint32) -> Any:
        return column(draw(st.lists(values, min_size=num_rows, max_size=num_rows)), dtype)

    return TokenRows(
        request_ids=draw(
            st.lists(st.binary(min_size=16, max_size=16), min_size=num_rows, max_size=num_rows, unique=True)
        ),
        sequences=drawn(st.integers(0, 127)),
        positions=drawn(U32),
        chains=drawn(st.integers(0, 2**64 - 1), np.uint64),
        counts=column(counts),
        token_ids=column(draw(st.lists(U32, min_size=num_tokens, max_size=num_tokens))),
        finishes=column(finishes, np.uint8),
        cached_tokens=drawn(U32),
        logprobs=draw(st.none() | logprobs(num_tokens)),
        errors={
            row: RequestError(ErrorCode.INTERNAL, f"row {row}", "n")
            for row, finish in enumerate(finishes)
            if finish == FinishReason.ERROR
        },
    )


@given(token_rows())
def test_rows_are_read_by_the_detokenizer_and_by_a_successor_as_they_were_made(rows: TokenRows) -> None:
    payload = encode_rows(rows, SESSION, Computed("", INCARNATION, 5, 11))
    same(decode_rows(payload), rows)
    computed, read = decode_tokens(payload)
    assert computed == Computed("", INCARNATION, 5, 11)
    same(read, rows)


@given(token_rows(), st.data())
def test_rows_of_all_shards_together_are_all_rows(rows: TokenRows, data: st.DataObject) -> None:
    wanted = np.array(data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows))), np.bool_)
    one, two = select_rows(rows, wanted), select_rows(rows, ~wanted)
    assert len(one) + len(two) == len(rows)
    tokens = dict(zip(rows.request_ids, np.split(rows.token_ids, np.cumsum(rows.counts)[:-1]), strict=False))
    for part in (one, two):
        starts = np.cumsum(part.counts) - part.counts
        for row, request_id in enumerate(part.request_ids):
            whole = rows.request_ids.index(request_id)
            assert part.positions[row] == rows.positions[whole]
            assert part.errors.get(row) == rows.errors.get(whole)
            np.testing.assert_array_equal(
                part.token_ids[starts[row] : starts[row] + part.counts[row]], tokens[request_id]
            )
        assert part.logprobs is None or len(part.logprobs.sampled) == len(part.token_ids)


def test_a_request_is_read_as_gateway_and_tokenizer_wrote_it() -> None:
    params = SamplingParams(
        n=3, temperature=0.5, top_k=7, min_p=0.25, presence_penalty=1.5, logit_bias={5: -2.0}, seed=9,
        max_tokens=11, min_tokens=2, stop_token_ids=[3, 4], ignore_eos=True, logprobs=2, bad_words=["a", "b c"],
    )  # fmt: skip
    made = Made(((8,), (9, 7, 4_000_000_000)), (5, 6), "start: /a/")
    header = Header(b"r" * 16, "tenant", -3, 1000, 2000, "", 2**64 - 1)
    meta = requests_pb2.TokenizedPrompt(
        num_tokens=3, eos_token_ids=column([0, 7]).tobytes(), max_tokens=11,
        made=encode_made(made),
    ).SerializeToString()  # fmt: skip
    body = encode_request(Request(header, "m", Prompt(token_ids=(1, 2, 3)), params))
    request = decode_request(b"r" * 16, encode_header(header), body, meta, column([1, 2, 3]).tobytes())
    assert request.prompt_token_ids.tolist() == [1, 2, 3]
    assert (request.n, request.seed, request.priority, request.tenant) == (3, 2**64 - 1, -3, "tenant")
    assert (request.arrival_ns, request.deadline_ns, request.eos_token_ids) == (1000, 2000, (0, 7))
    assert request.sampling == params.sampling.having(made)
    assert request.stopping == Stopping(11, 2, (3, 4), ignore_eos=True)
    assert num_samples(body) == 3


def test_a_request_that_is_taken_over_finds_the_same_blocks_again() -> None:
    header = Header(b"r" * 16, "tenant", 0, 1000, 0, "", 7)
    body = encode_request(Request(header, "m", Prompt(text="x"), SamplingParams(), "salt"))
    meta = requests_pb2.TokenizedPrompt(num_tokens=9).SerializeToString()
    token_ids = np.arange(9, dtype="<u4").tobytes()
    # Two schedulers read the same stored request; what another tenant's or another salt's would be is not it.
    one, two = (Scheduler(SchedulerConfig()) for _ in range(2))
    read = [decode_request(b"r" * 16, encode_header(header), body, meta, token_ids) for _ in range(2)]
    assert (read[0].tenant, read[0].cache_salt) == ("tenant", "salt")
    for scheduler, request in zip((one, two), read, strict=True):
        scheduler.add(request, 0)
    hashes = [scheduler.requests[b"r" * 16].sequences[0].hashes(4) for scheduler in (one, two)]
    assert len(hashes[0]) == 2
    assert hashes[0] == hashes[1]
    other = Scheduler(SchedulerConfig())
    other.add(dataclasses.replace(read[0], tenant="another"), 0)
    assert set(other.requests[b"r" * 16].sequences[0].hashes(4)).isdisjoint(hashes[0])


def test_a_request_without_parameters_has_the_defaults() -> None:
    request = decode_request(b"r" * 16, b"", b"", b"", b"")
    assert (request.n, request.sampling, request.stopping) == (1, Sampling(), Stopping())


def test_more_samples_than_a_request_may_have_are_poison() -> None:
    body = requests_pb2.GenerateRequest(n=2**32 - 1).SerializeToString()
    with pytest.raises(PoisonMessageError, match="samples"):
        decode_request(b"r" * 16, b"", body, b"", b"")
    assert num_samples(body) == 1


@pytest.mark.parametrize("token_ids", [b"", column([1, 2]).tobytes(), column([1, 2, 3]).tobytes()[:-1]])
def test_other_token_ids_than_were_counted_are_poison(token_ids: bytes) -> None:
    meta = requests_pb2.TokenizedPrompt(num_tokens=3).SerializeToString()
    with pytest.raises(PoisonMessageError, match="not a tokenized request"):
        decode_request(b"r" * 16, b"", b"", meta, token_ids)


def test_a_worker_offers_what_it_can_hold() -> None:
    info = worker_info(
        Limits(num_blocks=9, block_size=4, max_num_seqs=3, max_model_len=30, max_num_batched_tokens=64, vocab_size=5),
        model="m", home_shard=2, world_size=1, device="cpu", model_digest=b"model---",
    )  # fmt: skip
    offer = decode_worker_info(info.SerializeToString())
    assert (offer.model, offer.home_shard, offer.model_digest) == ("m", 2, b"model---")
    assert offer.limits.capacity == 30
    assert offer.limits.max_num_batched_tokens == 64
    info.num_blocks = 0
    with pytest.raises(PoisonMessageError, match="without blocks"):
        decode_worker_info(info.SerializeToString())


def row(request_id: bytes, position: int, before: int, tokens: list[int], finish: int = 0) -> bytes:
    rows = dataclasses.replace(
        NO_ROWS,
        request_ids=[request_id],
        sequences=column([0]),
        positions=column([position]),
        chains=column([before], np.uint64),
        counts=column([len(tokens)]),
        token_ids=column(tokens),
        finishes=column([finish], np.uint8),
        cached_tokens=column([0]),
    )
    return encode_rows(rows, SESSION, Computed())


def test_a_history_is_the_one_coherent_chain_in_the_log() -> None:
    one, other, start = b"1" * 16, b"2" * 16, chain.CHAIN_START
    after = chain.extend(start, [4, 5])
    payloads = [
        row(one, 0, start, [4, 5]),
        row(one, 0, start, [4, 5]),  # again
        row(one, 2, start, [9]),  # of another history
        row(other, 0, start, [8]),
        b"\xff\xff",
        row(one, 3, after, [9]),  # a gap
        row(one, 2, after, [6], FinishReason.LENGTH),
        row(one, 3, chain.extend(after, [6]), [7]),  # after the end
    ]
    histories = read_histories(payloads, {one: 2, b"3" * 16: 1})
    assert histories[one][0].token_ids == [4, 5, 6]
    assert histories[one][0].has_ended
    assert not histories[one][1].token_ids
    assert not histories[one][1].has_ended
    assert not histories[b"3" * 16][0].token_ids
    assert other not in histories


def test_a_damaged_request_ends_with_one_row_for_each_sample() -> None:
    error = RequestError(ErrorCode.INTERNAL, "damaged")
    rows = unstarted_rows(b"r" * 16, 3, error)
    assert rows.sequences.tolist() == [0, 1, 2]
    assert rows.errors == dict.fromkeys(range(3), error)
    same(decode_rows(encode_rows(rows, SESSION, Computed())), rows)
