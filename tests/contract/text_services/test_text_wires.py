"""What gateway and scheduler write is what tokenizer and detokenizer read, and the other way round."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.domain.errors import ErrorCode, PenstockError, PoisonMessageError
from contract.domain.finish import FinishReason, RequestError, Usage
from contract.domain.params import SamplingParams
from contract.domain.plan import Logprobs
from contract.domain.request import Header, Message, Prompt, Request
from contract.domain.rows import TokenRows
from contract.domain.timeline import Computed
from contract.v1 import requests_pb2
from detokenizer_svc import wire as detokenizer_wire
from detokenizer_svc.core.logprobs import LogprobLog
from detokenizer_svc.core.request import FinishedRequest, FinishedSequence
from detokenizer_svc.core.textrows import NewRow, SequenceEnd, text_rows
from gateway_svc import wire as gateway_wire
from gateway_svc.core.streams import DeliveredSequence
from scheduler_svc import wire as scheduler_wire
from servicekit.bus import keys as k
from tokenizer_svc import wire as tokenizer_wire

_HEADER = Header(b"r" * 16, "tenant", -3, 11, 22, "00-trace", 2**64 - 5)
_PARAMS = SamplingParams(
    n=3,
    temperature=0.5,
    top_p=0.25,
    top_k=7,
    min_p=0.125,
    repetition_penalty=1.5,
    presence_penalty=-0.5,
    frequency_penalty=0.75,
    logit_bias={5: -2.5, 9: 100.0},
    max_tokens=None,
    min_tokens=2,
    stop=("a", "日本"),
    stop_token_ids=(4, 8),
    ignore_eos=True,
    logprobs=0,
    skip_special_tokens=False,
    include_stop_str_in_output=True,
)


@pytest.mark.parametrize(
    "prompt",
    [
        Prompt(text=""),
        Prompt(text="日本 \x00 text"),
        Prompt(token_ids=(0, 2**32 - 1)),
        Prompt(messages=(Message("user", "hi"), Message("tool", "", {"name": "x", "calls": [{"a": None}]}))),
        Prompt(messages=(Message("user", "hi"),), chat_template_kwargs={"tools": [1.5], "enable_thinking": False}),
    ],
)
@pytest.mark.parametrize("params", [SamplingParams(), _PARAMS])
def test_the_tokenizer_reads_what_the_gateway_wrote(prompt: Prompt, params: SamplingParams) -> None:
    request = Request(_HEADER, "model", prompt, params)
    header = tokenizer_wire.decode_header(gateway_wire.encode_header(request.header))
    body, part = gateway_wire.encode_request(request), gateway_wire.encode_prompt(prompt)
    message = tokenizer_wire.decode_body(body, part)
    read = tokenizer_wire.decode_request(header, message)
    # The seed travels in the header; numbers have the precision of a float there and here.
    expected = dataclasses.replace(request, params=dataclasses.replace(params, seed=None))
    assert read.header == expected.header
    assert read.prompt == expected.prompt
    assert read.params.sampling == expected.params.sampling
    assert read.params.stopping == expected.params.stopping
    assert read.params.text == expected.params.text
    assert read.params.n == tokenizer_wire.num_samples(message) == params.n


@pytest.mark.parametrize(
    "change",
    [
        {"stopping": {"stop_token_ids": b"\x01"}},
        {"sampling": {"logit_bias_ids": b"\x01\x00\x00\x00"}},
        {"messages": {"template_kwargs_json": "[]"}},
        {"sampling": {"temperature": float("nan")}},
        {"n": 0},
        {"n": 2**31},
    ],
)
def test_a_request_that_makes_no_sense_is_the_callers(change: dict[str, Any]) -> None:
    message = requests_pb2.GenerateRequest(**change)
    with pytest.raises(PenstockError) as caught:
        tokenizer_wire.decode_request(_HEADER, message)
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT


def _opening(**changes: bytes) -> dict[bytes, bytes]:
    meta = requests_pb2.TokenizedPrompt(num_tokens=7, eos_token_ids=np.array([3, 4], "<u4").tobytes())
    fields = {
        k.REQUEST: _HEADER.request_id,
        k.HEADER: gateway_wire.encode_header(_HEADER),
        k.BODY: gateway_wire.encode_request(Request(_HEADER, "", Prompt(text="x"), _PARAMS)),
        k.META: meta.SerializeToString(),
    }
    return fields | {getattr(k, name): value for name, value in changes.items()}


def test_the_detokenizer_opens_what_gateway_and_tokenizer_wrote() -> None:
    opened = detokenizer_wire.decode_opening(_opening())
    assert opened.header == _HEADER
    assert (opened.n, opened.num_prompt_tokens, opened.min_tokens) == (3, 7, 2)
    assert opened.text == _PARAMS.text
    assert (opened.stop_token_ids, opened.eos_token_ids, opened.wants_logprobs) == ((4, 8), (), True)
    plain = gateway_wire.encode_request(Request(_HEADER, "", Prompt(text="x"), SamplingParams()))
    heeding = detokenizer_wire.decode_opening(_opening(BODY=plain))
    assert (heeding.eos_token_ids, heeding.wants_logprobs) == ((3, 4), False)


@pytest.mark.parametrize(
    ("prompt", "is_chat"),
    [
        (Prompt(text="a long story"), False),
        (Prompt(token_ids=(1, 2)), False),
        (Prompt(messages=(Message("user", "a long story"),)), True),
    ],
)
def test_who_does_not_tokenize_reads_no_prompt(prompt: Prompt, is_chat: bool) -> None:
    body = gateway_wire.encode_request(Request(_HEADER, "", prompt, _PARAMS))
    assert b"story" not in body
    assert not requests_pb2.GenerateRequest.FromString(body).messages.messages
    assert detokenizer_wire.decode_opening(_opening(BODY=body)).asked.is_chat == is_chat


@pytest.mark.parametrize(
    "changes",
    [
        {"HEADER": b"\xff"},
        {"BODY": b"\xff"},
        {"META": b"\xff"},
        {"HEADER": b""},
        {"BODY": requests_pb2.GenerateRequest(n=0).SerializeToString()},
        {"BODY": requests_pb2.GenerateRequest(n=1_000_000).SerializeToString()},
        {"META": requests_pb2.TokenizedPrompt(eos_token_ids=b"\x01").SerializeToString()},
    ],
)
def test_an_opening_that_cannot_be_read_names_its_request(changes: dict[str, bytes]) -> None:
    with pytest.raises(PoisonMessageError) as caught:
        detokenizer_wire.decode_opening(_opening(**changes))
    assert caught.value.request_ids == [_HEADER.request_id]


def _token_rows() -> TokenRows:
    return TokenRows(
        request_ids=[b"a" * 16, b"b" * 16, b"c" * 16],
        sequences=np.array([0, 1, 2], np.uint32),
        positions=np.array([5, 0, 2**31], np.uint32),
        chains=np.array([1, 2**64 - 1, 3], np.uint64),
        counts=np.array([1, 2, 0], np.uint32),
        token_ids=np.array([7, 8, 9], np.uint32),
        finishes=np.array([0, FinishReason.STOP, FinishReason.ERROR], np.uint8),
        cached_tokens=np.array([0, 4, 0], np.uint32),
        logprobs=Logprobs(
            np.array([-1.0, np.nan, -0.5], np.float32),
            np.array([3, 0, 2**31], np.uint32),
            np.array([2, 0, 1], np.uint32),
            np.array([1, 2, 3], np.uint32),
            np.array([-1.0, -2.0, -3.0], np.float32),
        ),
        errors={2: RequestError(ErrorCode.DEADLINE_EXCEEDED, "late", "deadline")},
    )


def test_the_detokenizer_reads_the_rows_that_the_scheduler_wrote() -> None:
    rows = _token_rows()
    payload = scheduler_wire.encode_rows(rows, b"s" * 16, Computed("", b"i" * 16, 4, 77))
    computed, read = detokenizer_wire.decode_tokens(payload)
    assert computed == Computed("", b"i" * 16, 4, 77)
    assert (read.request_ids, read.errors) == (rows.request_ids, rows.errors)
    for name in ("sequences", "positions", "chains", "counts", "token_ids", "finishes", "cached_tokens"):
        assert getattr(read, name).tolist() == getattr(rows, name).tolist()
    assert read.logprobs is not None
    assert rows.logprobs is not None
    for name in ("sampled", "ranks", "top_counts", "top_ids", "top_logprobs"):
        np.testing.assert_array_equal(getattr(read.logprobs, name), getattr(rows.logprobs, name))


@settings(max_examples=300)
@given(data=st.data())
def test_damaged_rows_are_poison_or_rows_and_never_a_crash(data: st.DataObject) -> None:
    payload = bytearray(scheduler_wire.encode_rows(_token_rows(), b"s" * 16, Computed("", b"i" * 16, 4, 77)))
    for _ in range(data.draw(st.integers(1, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    try:
        _, rows = detokenizer_wire.decode_tokens(bytes(payload))
    except PoisonMessageError:
        return
    assert int(rows.counts.sum()) == len(rows.token_ids)


@pytest.mark.parametrize(
    ("column", "value"), [("sequences", []), ("counts", [1, 1, 0]), ("finishes", [0, 9, 0]), ("chains", [1])]
)
def test_columns_that_do_not_fit_name_the_requests_they_concern(column: str, value: list[int]) -> None:
    rows = _token_rows()
    changed = dataclasses.replace(rows, **{column: np.array(value, getattr(rows, column).dtype)})
    with pytest.raises(PoisonMessageError) as caught:
        detokenizer_wire.decode_tokens(scheduler_wire.encode_rows(changed, b"s" * 16, Computed("", b"", 1, 1)))
    assert caught.value.request_ids == rows.request_ids


def _log(*tokens: tuple[float, bytes, list[tuple[int, float, bytes]]]) -> LogprobLog:
    log = LogprobLog()
    for sampled, token_bytes, top in tokens:
        log.append(sampled, 7 + len(log), token_bytes, top, text_offset=3 * len(log))
    return log


_ROWS = [
    NewRow(b"a" * 16, 0, 1, 3, 99, [5], "é"),
    NewRow(
        b"b" * 16,
        2,
        1,
        0,
        2**64 - 1,
        [6, 7],
        "xy",
        logprobs=_log((0.0, b"", []), (-0.5, b"x", [(6, -0.5, b"x"), (9, -3.0, b"\xe6")]), (-1.0, b"y", [])),
    ),
    NewRow(b"c" * 16, 0, 0, 0, 1, [], "", SequenceEnd(FinishReason.STOP, "stop"), num_prompt_tokens=77),
    NewRow(b"d" * 16, 0, 4, 4, 1, [3], "", SequenceEnd(FinishReason.STOP, 3, usage=Usage(1, 2, 3))),
    NewRow(
        b"e" * 16, 1, 0, 0, 1, [], "", SequenceEnd(FinishReason.ERROR, error=RequestError(ErrorCode.INTERNAL, "m", "p"))
    ),
]


def test_the_gateway_reads_the_text_that_the_detokenizer_wrote() -> None:
    rows = text_rows(_ROWS)
    sent_ns, read = gateway_wire.decode_text(detokenizer_wire.encode_text(rows, b"s" * 16, 55))
    assert sent_ns == 55
    assert read == list(rows.rows())
    assert read[1].logprobs[0].top_bytes == (b"x", b"\xe6")
    assert [entry.text_offset for entry in read[1].logprobs] == [3, 6]
    assert [entry.rank for entry in read[1].logprobs] == [8, 9]
    assert [row.num_prompt_tokens for row in read] == [0, 0, 77, 0, 0]


def test_the_gateway_reads_the_result_that_the_detokenizer_wrote() -> None:
    log = _log((-0.5, b"x", [(6, -0.5, b"x")]), (-1.0, b"y", []))
    usage = Usage(1, 2, 0)
    result = FinishedRequest(
        _HEADER,
        (
            FinishedSequence("xy", np.array([6, 7], np.uint32), log, SequenceEnd(FinishReason.LENGTH, usage=usage)),
            FinishedSequence("", np.empty(0, np.uint32), None, SequenceEnd(FinishReason.STOP, "x", usage=usage)),
        ),
        usage,
    )
    payload = detokenizer_wire.encode_finished(result)
    assert gateway_wire.decode_finished(_HEADER.request_id, payload) == list(result.rows().rows())


def test_the_detokenizer_reads_the_offsets_that_the_gateway_wrote() -> None:
    payload = gateway_wire.encode_offsets([DeliveredSequence(1, 2, 3), DeliveredSequence(4, 5, 6)])
    assert detokenizer_wire.decode_offsets(payload) == [(1, 2, 3), (4, 5, 6)]


def test_the_detokenizer_ends_what_the_tokenizer_rejected() -> None:
    error = PenstockError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, "too long", param="prompt")
    payload = tokenizer_wire.encode_rejection(b"r" * 16, 2, error, b"s" * 16, 9)
    computed, rows = detokenizer_wire.decode_tokens(payload)
    assert computed.sent_ns == 9
    assert rows.errors == dict.fromkeys(range(2), RequestError.of(error))
    assert rows.finishes.tolist() == [FinishReason.ERROR] * 2
    assert rows.sequences.tolist() == [0, 1]
