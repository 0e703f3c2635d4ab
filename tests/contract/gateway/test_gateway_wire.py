"""What the gateway writes is what tokenizer and scheduler read; what it cannot read it says so of."""

import contextlib
import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.domain.errors import PenstockError, PoisonMessageError
from contract.domain.generation_defaults import OPENAI_DEFAULTS, GenerationDefaults
from contract.domain.params import SamplingParams
from contract.domain.pooling import PLAIN_POOLING, PoolingFacts
from contract.domain.request import Header, Message, Prompt, Request
from contract.v1 import common_pb2, inference_pb2, requests_pb2, text_pb2
from contract.wire import requests as wire_requests
from gateway_svc import wire
from gateway_svc.core.formats.choice import NO_FORMATS, ModelFormats
from gateway_svc.core.streams import DeliveredSequence
from scheduler_svc import wire as scheduler_wire
from tokenizer_svc import wire as tokenizer_wire

f32 = st.floats(0, 1, width=32)
token_ids = st.lists(st.integers(0, 2**32 - 1), max_size=3)
params = st.builds(
    SamplingParams,
    n=st.integers(1, 128),
    temperature=st.floats(0, 100, width=32),
    top_p=st.floats(np.float32(1e-6).item(), 1, width=32),
    top_k=st.integers(0, 2**32 - 1),
    min_p=f32,
    repetition_penalty=st.floats(np.float32(0.25).item(), 100, width=32),
    presence_penalty=st.floats(-2, 2, width=32),
    frequency_penalty=st.floats(-2, 2, width=32),
    logit_bias=st.dictionaries(st.integers(0, 2**32 - 1), st.floats(-100, 100, width=32), max_size=4).map(
        lambda biases: dict(sorted(biases.items()))
    ),
    seed=st.just(None),
    max_tokens=st.none() | st.integers(1, 2**32 - 1),
    stop=st.lists(st.text(min_size=1, max_size=5), max_size=3).map(tuple),
    stop_token_ids=token_ids.map(tuple),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 20),
    skip_special_tokens=st.booleans(),
    include_stop_str_in_output=st.booleans(),
    suppress_tokens=token_ids.map(tuple),
    bad_words=st.lists(st.text(min_size=1, max_size=5), max_size=3).map(tuple),
    allowed_token_ids=st.none() | token_ids.filter(len).map(tuple),
)
json_values = st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=5)
objects = st.none() | st.dictionaries(st.text(max_size=5), json_values, min_size=1, max_size=3)
text_parts = st.lists(
    st.builds(lambda text: {"type": "text", "text": text}, st.text(max_size=5)), min_size=1, max_size=3
).map(tuple)
prompts = (
    st.builds(Prompt, text=st.text(max_size=20))
    | st.builds(Prompt, token_ids=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=9).map(tuple))
    | st.builds(
        Prompt,
        messages=st.lists(
            st.builds(Message, st.sampled_from(["user", "assistant"]), st.text(max_size=9) | text_parts, objects)
            | st.builds(Message, st.just("assistant"), st.none(), st.just({"tool_calls": []})),
            min_size=1,
            max_size=3,
        ).map(tuple),
        chat_template_kwargs=objects,
    )
)
headers = st.builds(
    Header,
    request_id=st.binary(min_size=16, max_size=16),
    tenant=st.text(max_size=5),
    priority=st.integers(-(2**31), 2**31 - 1),
    arrival_ns=st.integers(0, 2**63),
    deadline_ns=st.integers(0, 2**63),
    traceparent=st.text(max_size=5),
    seed=st.integers(0, 2**64 - 1),
)
requests = st.builds(Request, headers, st.text(max_size=5), prompts, params)


@settings(max_examples=100)
@given(requests)
def test_a_request_arrives_as_it_was_checked(request: Request) -> None:
    header, body, prompt = (
        wire.encode_header(request.header),
        wire.encode_request(request),
        wire.encode_prompt(request.prompt),
    )
    read = tokenizer_wire.decode_request(tokenizer_wire.decode_header(header), tokenizer_wire.decode_body(body, prompt))
    assert read.header == request.header
    assert read.model == request.model
    assert read.prompt == request.prompt
    assert read.params.sampling == request.params.sampling
    assert read.params.stopping == request.params.stopping
    assert read.params.text == request.params.text
    assert read.params.bad_words == request.params.bad_words
    queued = scheduler_wire.decode_request(request.header.request_id, header, body, b"", b"")
    assert (queued.n, queued.sampling, queued.seed) == (request.params.n, request.params.sampling, request.header.seed)
    # A gRPC client's message of the same content is checked to the same values.
    call = inference_pb2.GenerateCall(request=requests_pb2.GenerateRequest.FromString(body + prompt))
    ask = wire.decode_generate(call, AnyModel())
    assert (ask.prompts[0], ask.params.sampling) == (request.prompt, request.params.sampling)
    assert (ask.params.seed or 0) % 2**64 == request.header.seed


class AnyModel:
    """A model of which nothing is known."""

    def defaults(self, name: str) -> GenerationDefaults:
        del name
        return OPENAI_DEFAULTS

    def formats(self, name: str) -> ModelFormats:
        del name
        return NO_FORMATS

    def pooling(self, name: str) -> PoolingFacts:
        del name
        return PLAIN_POOLING


@pytest.mark.parametrize(
    "changed",
    [{"n": 2}, {"temperature": 0.5}, {"logit_bias": {5: 1.0}}, {"stop": ("a",)}, {"stop_token_ids": (3,)}, {"seed": 4}],
)
def test_remembered_parameters_are_not_taken_for_others(changed: dict[str, Any]) -> None:
    header = Header(os.urandom(16), "", 0, 1, 0, "", 1)
    for params in (SamplingParams(), SamplingParams(**changed), SamplingParams()):
        body = tokenizer_wire.decode_body(wire.encode_request(Request(header, "m", Prompt(text="x"), params)), b"")
        read = tokenizer_wire.decode_request(header, body).params
        assert replace(read, seed=params.seed) == params


@pytest.mark.parametrize(
    "sampling",
    [
        requests_pb2.SamplingParameters(temperature=-1.0),
        requests_pb2.SamplingParameters(logit_bias_ids=bytes(1 << 16), logit_bias_values=bytes(1 << 16)),
    ],
    ids=["refused", "large"],
)
def test_parameters_that_are_refused_or_large_are_not_remembered(sampling: requests_pb2.SamplingParameters) -> None:
    caches = [each for each in vars(wire_requests).values() if hasattr(each, "cache_info")]
    assert caches
    for cache in caches:
        cache.cache_clear()
    call = inference_pb2.GenerateCall(request=requests_pb2.GenerateRequest(text="x", sampling=sampling))
    with contextlib.suppress(PenstockError):
        wire.decode_generate(call, AnyModel())
    assert not any(cache.cache_info().currsize for cache in caches)


def test_the_smallest_positive_numbers_stay_positive() -> None:
    header = Header(os.urandom(16), "", 0, 1, 0, "", 1)
    tiny = SamplingParams(top_p=1e-60, repetition_penalty=1e-60)
    body = wire.encode_request(Request(header, "m", Prompt(text="x"), tiny))
    assert tokenizer_wire.decode_request(header, tokenizer_wire.decode_body(body, b"")).params.top_p > 0


def text_batch() -> text_pb2.TextBatch:
    """Two rows, logprobs, one end."""
    end = text_pb2.SequenceEnd(reason=common_pb2.FINISH_REASON_STOP, stop_string="x")
    return text_pb2.TextBatch(
        origin=common_pb2.Origin(sent_unix_ns=5),
        request_ids=b"a" * 16 + b"b" * 16,
        sequences=np.array([0, 1], "<u4").tobytes(),
        token_offsets=np.array([3, 4], "<u4").tobytes(),
        text_offsets=np.array([5, 6], "<u4").tobytes(),
        chains=np.array([7, 8], "<u8").tobytes(),
        counts=np.array([1, 2], "<u4").tobytes(),
        token_ids=np.array([10, 11, 12], "<u4").tobytes(),
        texts=["one", "two"],
        logprobs=common_pb2.LogprobColumns(
            sampled=np.array([np.nan, -1, -2], "<f4").tobytes(),
            ranks=np.array([0, 1, 5], "<u4").tobytes(),
            top_counts=np.array([0, 1, 0], "<u4").tobytes(),
            top_ids=np.array([13], "<u4").tobytes(),
            top_logprobs=np.array([-0.5], "<f4").tobytes(),
            byte_counts=np.array([0, 1, 2, 1], "<u4").tobytes(),
            token_bytes=b"pqrs",
            text_offsets=np.array([0, 6, 8], "<u4").tobytes(),
        ),
        first_rows=np.array([1], "<u4").tobytes(),
        prompt_tokens=np.array([9], "<u4").tobytes(),
        end_rows=np.array([1], "<u4").tobytes(),
        ends=[end],
    )


def test_text_rows_are_read_column_by_column() -> None:
    sent_ns, (first, second) = wire.decode_text(text_batch().SerializeToString())
    assert sent_ns == 5
    assert (first.request_id, first.sequence, first.token_offset, first.text_offset) == (b"a" * 16, 0, 3, 5)
    assert (first.chain, first.token_ids, first.text, first.logprobs, first.finish) == (7, (10,), "one", (), 0)
    assert (second.token_ids, second.stop_reason, second.finish) == ((11, 12), "x", 1)
    entry = second.logprobs[0]
    assert (entry.logprob, entry.token_bytes, entry.top, entry.top_bytes) == (-1, b"p", ((13, -0.5),), (b"s",))
    assert second.logprobs[1].token_bytes == b"qr"
    assert [entry.rank for entry in second.logprobs] == [1, 5]
    assert [entry.text_offset for entry in second.logprobs] == [6, 8]
    assert (first.num_prompt_tokens, second.num_prompt_tokens) == (0, 9)


@pytest.mark.parametrize(
    "column",
    [
        *("request_ids", "sequences", "token_offsets", "text_offsets", "chains", "counts", "token_ids", "end_rows"),
        *("first_rows", "prompt_tokens"),
    ],
)
def test_a_column_of_another_length_is_poison(column: str) -> None:
    batch = text_batch()
    setattr(batch, column, getattr(batch, column)[:-4])
    with pytest.raises(PoisonMessageError):
        wire.decode_text(batch.SerializeToString())


@pytest.mark.parametrize(
    "column",
    ["sampled", "ranks", "top_counts", "top_ids", "top_logprobs", "byte_counts", "token_bytes", "text_offsets"],
)
def test_a_logprob_column_of_another_length_is_poison(column: str) -> None:
    batch = text_batch()
    setattr(batch.logprobs, column, getattr(batch.logprobs, column)[:-1])
    with pytest.raises(PoisonMessageError):
        wire.decode_text(batch.SerializeToString())


@settings(max_examples=300)
@given(st.binary(max_size=200), st.integers(0, 400), st.integers(0, 400))
def test_nothing_but_poison_is_said_of_damaged_messages(noise: bytes, start: int, length: int) -> None:
    whole = text_batch().SerializeToString()
    damaged = whole[:start] + noise + whole[start + length :]
    for decode in (wire.decode_text, wire.decode_worker, lambda payload: wire.decode_finished(b"r" * 16, payload)):
        with contextlib.suppress(PoisonMessageError):
            decode(damaged)


def test_an_error_code_of_a_newer_version_is_kept_as_an_error() -> None:
    batch = text_batch()
    batch.ends[0].reason = common_pb2.FINISH_REASON_ERROR
    batch.ends[0].error.message = "something new"
    batch.ends[0].error.code = 99  # type: ignore[assignment]
    error = wire.decode_text(batch.SerializeToString())[1][1].error
    assert error is not None
    assert (error.code, error.message) == (0, "something new")


def test_offsets_tell_what_a_client_has() -> None:
    states = [DeliveredSequence(1, 2, 3), DeliveredSequence(4, 5, 2**64 - 1)]
    offsets = text_pb2.AttachOffsets.FromString(wire.encode_offsets(states))
    assert np.frombuffer(offsets.token_offsets, "<u4").tolist() == [1, 4]
    assert np.frombuffer(offsets.text_offsets, "<u4").tolist() == [2, 5]
    assert np.frombuffer(offsets.chains, "<u8").tolist() == [3, 2**64 - 1]
