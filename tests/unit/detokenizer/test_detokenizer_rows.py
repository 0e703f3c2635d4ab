"""Rows of the log become text rows, ends and results: the same ones however the log is cut, doubled or mixed."""

import dataclasses

import numpy as np
import pytest
from detokenizer_log import Client, Log, header, opened, run
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers_under_test import byte_level, llama2

from contract.domain.errors import ErrorCode
from contract.domain.finish import FinishReason, RequestError, Usage
from contract.domain.params import TextOptions
from contract.domain.plan import Logprobs
from detokenizer_svc.core.detokenizer import Detokenizer
from detokenizer_svc.core.effects import Cancellation
from detokenizer_svc.core.request import OpenRequest
from detokenizer_svc.core.sequence import Offset

EOS = 0  # `<|end|>` of the byte-level tokenizer
_IDS = st.lists(st.integers(1, 424), max_size=24)


def _ids(text: str) -> list[int]:
    ids: list[int] = byte_level().encode(text).ids
    return ids


@settings(max_examples=80)
@given(data=st.data(), ids=_IDS, skip=st.booleans())
def test_any_cut_into_rows_gives_the_text_of_a_full_decode(data: st.DataObject, ids: list[int], skip: bool) -> None:
    request = opened(text=TextOptions(skip_special_tokens=skip))
    log = Log(request).cut(data, ids, FinishReason.LENGTH)
    client, retired = run(Detokenizer(byte_level()), request, log)
    assert client.texts == [byte_level().decode(ids, skip_special_tokens=skip)]
    assert client.token_ids == [ids]
    assert retired.sequences[0].text == client.texts[0]
    assert retired.sequences[0].token_ids.tolist() == ids
    assert retired.sequences[0].end.reason is FinishReason.LENGTH
    assert retired.usage == Usage(7, len(ids), 0)


@settings(max_examples=80)
@given(
    data=st.data(),
    ids=_IDS,
    stops=st.lists(st.sampled_from(["a", "the", " ", "e m", "\ufffd", "日", "本語"]), min_size=1, max_size=3),
    include=st.booleans(),
    min_tokens=st.integers(0, 3),
)
def test_stop_strings_do_not_depend_on_the_cut(
    data: st.DataObject, ids: list[int], stops: list[str], include: bool, min_tokens: int
) -> None:
    request = opened(text=TextOptions(tuple(stops), include), min_tokens=min_tokens)
    outcomes = []
    for one_by_one in (True, False):
        log = Log(request)
        log = log.rows_of_one(ids, FinishReason.LENGTH) if one_by_one else log.cut(data, ids, FinishReason.LENGTH)
        client, retired = run(Detokenizer(byte_level()), request, log)
        assert client.texts[0] == retired.sequences[0].text
        outcomes.append((retired.sequences[0].text, retired.sequences[0].end, client.token_ids))
    assert outcomes[0] == outcomes[1]
    text, end, token_ids = outcomes[0]
    whole = byte_level().decode(ids)
    if end.reason is FinishReason.LENGTH:
        assert text == whole
        if not min_tokens:
            assert not any(stop in whole for stop in stops)
    else:
        assert end.stop_reason in stops
        assert whole.startswith(text if include else text + str(end.stop_reason))
        assert text.endswith(str(end.stop_reason)) or not include
        assert len(token_ids[0]) > min_tokens


def test_a_stop_string_ends_the_sequence_at_the_token_that_completes_it_and_cancels_the_rest() -> None:
    request = opened(text=TextOptions(("mill",)))
    ids = _ids("the old mill stood")
    log = Log(request).rows_of_one(ids)
    detokenizer = Detokenizer(byte_level())
    detokenizer.open(request, b"g")
    cancels, retirements = [], []
    for rows in log:
        effects = detokenizer.push(rows)
        cancels += effects.cancels
        retirements += effects.retirements
    (retired,) = retirements
    assert cancels == [Cancellation(request.request_id, 0)]
    assert retired.result.sequences[0].text == "the old "
    assert retired.result.sequences[0].end.stop_reason == "mill"
    used = retired.result.usage.num_output_tokens
    assert "mill" in byte_level().decode(ids[:used])
    assert "mill" not in byte_level().decode(ids[: used - 1])
    assert detokenizer.stats.num_ended_rows == len(ids) - used


@pytest.mark.parametrize(
    ("token", "eos", "stops", "options", "text", "reason"),
    [
        (EOS, (EOS,), (), (False, True), "ab", None),
        (EOS, (EOS,), (), (True, True), "ab", None),
        (EOS, (EOS,), (), (False, False), "ab", None),
        (EOS, (EOS,), (), (True, False), "ab<|end|>", None),
        (EOS, (EOS,), (EOS,), (False, True), "ab", None),
        (EOS, (), (EOS,), (False, True), "ab", EOS),
        ("z", (EOS,), ("z",), (False, True), "ab", "z"),
        ("z", (EOS,), ("z",), (True, True), "abz", "z"),
    ],
)
def test_the_token_that_stops_is_hidden_unless_asked_for(  # noqa: PLR0917
    token: int | str,
    eos: tuple[int, ...],
    stops: tuple[int | str, ...],
    options: tuple[bool, bool],
    text: str,
    reason: int | str | None,
) -> None:
    def as_id(value: int | str) -> int:
        return value if isinstance(value, int) else _ids(value)[0]

    request = opened(
        text=TextOptions((), *options),
        eos_token_ids=eos,
        stop_token_ids=tuple(as_id(stop) for stop in stops),
    )
    ids = [*_ids("ab"), as_id(token)]
    _, retired = run(Detokenizer(byte_level()), request, Log(request).rows_of_one(ids, FinishReason.STOP))
    assert retired.sequences[0].text == text
    assert retired.sequences[0].end.reason is FinishReason.STOP
    assert retired.sequences[0].end.stop_reason == (None if reason is None else as_id(reason))
    assert retired.usage.num_output_tokens == len(ids)


def test_text_held_back_comes_with_the_end() -> None:
    request = opened(text=TextOptions(("abcd",)))
    ids = [*_ids("xab"), *_ids("日")[:1]]
    client, retired = run(Detokenizer(byte_level()), request, Log(request).rows_of_one(ids, FinishReason.CANCELLED))
    assert client.texts[0] == byte_level().decode(ids)
    assert retired.sequences[0].end.reason is FinishReason.CANCELLED


def test_a_stop_string_in_the_text_held_back_beats_the_end_of_the_row() -> None:
    tokenizer = llama2()
    request = opened(text=TextOptions(("\ufffd",)), eos_token_ids=(2,))
    incomplete = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "日".encode()[:2]]
    ids = [tokenizer.token_to_id("a"), *incomplete, 2]
    _, retired = run(Detokenizer(tokenizer), request, Log(request).rows_of_one(ids, FinishReason.STOP))
    assert retired.sequences[0].text == "a"
    assert retired.sequences[0].end.stop_reason == "\ufffd"


@pytest.mark.parametrize(
    ("min_tokens", "text", "reason"), [(1, "a", "\ufffd"), (2, "a\ufffd", None), (3, "a\ufffd", None)]
)
def test_a_stop_string_in_the_text_held_back_does_not_count_before_min_tokens(
    min_tokens: int, text: str, reason: str | None
) -> None:
    """Two tokens, the second of which is a part of a character: its text is made when the sequence ends."""
    request = opened(text=TextOptions(("\ufffd",)), min_tokens=min_tokens)
    ids = [*_ids("a"), *_ids("日")[:1]]
    _, retired = run(Detokenizer(byte_level()), request, Log(request).rows_of_one(ids, FinishReason.LENGTH))
    assert retired.sequences[0].text == text
    assert retired.sequences[0].end.stop_reason == reason
    assert retired.sequences[0].end.reason is (FinishReason.LENGTH if reason is None else FinishReason.STOP)


def test_an_error_row_ends_every_sequence_with_what_there_is() -> None:
    request = opened(n=2)
    error = RequestError(ErrorCode.INTERNAL, "the worker is broken")
    log = Log(request)
    log.add(0, _ids("half a "))
    log.add(1, [], FinishReason.ERROR, error)
    log.add(0, [], FinishReason.ERROR, error)
    client, retired = run(Detokenizer(byte_level()), request, log)
    assert client.texts == ["half a ", ""]
    assert [sequence.end.error for sequence in retired.sequences] == [error, error]


@settings(max_examples=80)
@given(data=st.data(), ids=_IDS)
def test_doubled_and_late_rows_change_nothing(data: st.DataObject, ids: list[int]) -> None:
    request = opened()
    rows = list(Log(request).cut(data, ids, FinishReason.LENGTH))
    told = list(rows)
    for row in data.draw(st.lists(st.sampled_from(rows), max_size=4)):
        # Never before its first coming: that would be a gap, and the log has no gaps.
        told.insert(data.draw(st.integers(rows.index(row) + 1, len(told))), row)
    clean, _ = run(Detokenizer(byte_level()), request, rows)
    doubled, retired = run(Detokenizer(byte_level()), request, told)
    assert doubled == clean
    assert retired.usage.num_output_tokens == len(ids)


@settings(max_examples=100)
@given(ids=st.lists(st.integers(1, 424), min_size=1, max_size=12), known=st.data())
def test_a_row_that_is_known_in_part_adds_only_its_new_part(ids: list[int], known: st.DataObject) -> None:
    cut = known.draw(st.integers(0, len(ids)))
    request = opened()
    log = Log(request).add(0, ids[:cut])
    whole = Log(request).add(0, ids, FinishReason.LENGTH)
    client, _ = run(Detokenizer(byte_level()), request, [*log, *whole])
    assert client.token_ids == [ids]


def test_a_row_of_another_history_is_refused_and_counted() -> None:
    request = opened()
    detokenizer = Detokenizer(byte_level())
    detokenizer.open(request, b"g")
    ours, theirs = Log(request).add(0, [5, 6]), Log(request).add(0, [5, 7])
    detokenizer.push(ours.batch())
    for tokens in ([8], [9, 10]):
        assert not list(detokenizer.push(theirs.add(0, tokens).last()).rows())
    # The same tokens in part, then others: cut at what is known, the hash tells.
    assert not list(detokenizer.push(Log(request).add(0, [5, 7, 8]).last()).rows())
    assert detokenizer.stats.num_mismatched_rows == 2
    assert detokenizer.stats.num_gap_rows == 1
    (row,) = detokenizer.push(ours.add(0, [8]).last()).rows()
    assert row.token_ids == (8,)


def test_a_gap_is_refused_and_counted() -> None:
    request = opened()
    detokenizer = Detokenizer(byte_level())
    detokenizer.open(request, b"g")
    log = Log(request).add(0, [5])
    assert not list(detokenizer.push(log.add(0, [6]).last()).rows())
    assert detokenizer.stats.num_gap_rows == 1


def test_rows_of_strangers_are_counted() -> None:
    detokenizer = Detokenizer(byte_level())
    request = opened()
    detokenizer.push(Log(request).add(0, [5]).batch())
    assert detokenizer.stats.num_unknown_rows == 1
    detokenizer.open(request, b"g")
    detokenizer.push(Log(dataclasses.replace(request, n=3)).add(2, [5]).batch())
    assert detokenizer.stats.num_unknown_rows == 2


def test_a_request_ends_with_its_last_sequence_and_only_then_tells_usage() -> None:
    request = opened(n=2)
    detokenizer = Detokenizer(byte_level())
    detokenizer.open(request, b"g")
    log = Log(request)
    log.add(0, [5], FinishReason.LENGTH)
    log.add(1, [5], cached_tokens=4)
    first = detokenizer.push(log.batch())
    assert not first.retirements
    ends = [row for row in first.rows() if row.finish]
    assert [(row.sequence, row.usage) for row in ends] == [(0, None)]
    last = detokenizer.push(log.add(1, [6], FinishReason.STOP).last())
    (retired,) = last.retirements
    assert retired.result.usage == Usage(7, 3, 4)
    assert [row.usage for row in last.rows()] == [Usage(7, 3, 4)]
    assert request.request_id not in detokenizer
    # Opening it again (a doubled log entry) does not bring it back.
    detokenizer.open(request, b"g")
    assert request.request_id not in detokenizer


def test_logprobs_travel_with_their_tokens() -> None:
    asked, silent = opened(wants_logprobs=True), opened(request_id=b"s" * 16)
    detokenizer = Detokenizer(byte_level())
    for request in (silent, asked):
        detokenizer.open(request, b"g")
    ids = _ids("the mill")[:2]
    log = Log(silent).add(0, ids[:1])
    log.join(Log(asked).add(0, ids, FinishReason.LENGTH))
    logprobs = Logprobs(
        np.array([np.nan, -0.5, -1.5], np.float32),
        np.array([0, 1, 40], np.uint32),
        np.array([0, 2, 1], np.uint32),
        np.array([ids[0], 9, 10], np.uint32),
        np.array([-0.5, -2.0, -0.25], np.float32),
    )
    effects = detokenizer.push(dataclasses.replace(log.batch(), logprobs=logprobs))
    by_request = {row.request_id: row for row in effects.rows()}
    assert by_request[silent.request_id].logprobs == ()
    first, second = by_request[asked.request_id].logprobs
    assert (first.token_id, first.logprob, first.top) == (ids[0], -0.5, ((ids[0], -0.5), (9, -2.0)))
    assert first.token_bytes == byte_level().decode(ids[:1]).encode() == first.top_bytes[0]
    assert second.top == ((10, -0.25),)
    assert (first.rank, second.rank) == (1, 40)
    (retired,) = effects.retirements
    stored = retired.result.sequences[0].logprobs
    assert stored is not None
    assert stored.columns().top_ids.tolist() == [ids[0], 9, 10]
    assert stored.columns().ranks.tolist() == [1, 40]
    assert stored.token_bytes()[0] == first.token_bytes


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("at_once", [True, False])
def test_text_offsets_pass_over_what_has_no_text(at_once: bool, skips: bool) -> None:
    """Split characters, skipped special tokens, and text that may be the beginning of a stop string."""
    tokenizer = byte_level()
    special = tokenizer.token_to_id("<|start|>")
    snow, rest = tokenizer.encode("雪").ids, _ids("the mill")
    assert len(snow) == 3
    ids = [special, *snow, *rest, special]
    texts = ["" if skips else "<|start|>", "", "", "雪", *(tokenizer.decode([each]) for each in rest)]
    offsets = [sum(map(len, texts[:index])) for index in range(len(ids))]
    request = opened(wants_logprobs=True, text=TextOptions(stop=("mill!",), skip_special_tokens=skips))
    detokenizer = Detokenizer(tokenizer)
    detokenizer.open(request, b"g")
    log = Log(request)
    for some in [ids] if at_once else [[each] for each in ids]:
        log.add(0, some)
    log.add(0, [], FinishReason.LENGTH)
    zeros = np.zeros(len(ids), np.uint32)
    logprobs = Logprobs(np.full(len(ids), -1, np.float32), zeros, zeros, zeros[:0], np.empty(0, np.float32))
    effects = detokenizer.push(dataclasses.replace(log.batch(), logprobs=logprobs))
    told = [entry.text_offset for row in effects.rows() for entry in row.logprobs]
    assert told == offsets
    stored = effects.retirements[0].result.sequences[0].logprobs
    assert stored is not None
    assert stored.text_offsets().tolist() == offsets


def test_a_row_that_begins_its_sequence_tells_the_tokens_of_the_prompt() -> None:
    detokenizer = Detokenizer(byte_level())
    one, two = opened(n=2, num_prompt_tokens=9), opened(request_id=b"s" * 16, num_prompt_tokens=5)
    for request in (one, two):
        detokenizer.open(request, b"g")
    ids = _ids("the mill")
    log = Log(one).add(0, ids[:1])
    log.join(Log(two).add(0, ids[:2]))
    assert [row.num_prompt_tokens for row in detokenizer.push(log.batch()).rows()] == [9, 5]
    log = Log(one).add(0, ids[:1]).add(0, ids[1:2]).add(1, ids[:1])  # the first comes again, for nothing
    rows = list(detokenizer.push(log.batch()).rows())
    assert [(row.sequence, row.num_prompt_tokens) for row in rows] == [(0, 0), (1, 9)]
    again = detokenizer.attach(one.request_id, b"h", [Offset(0, 0), Offset(1, 0)])
    assert [(row.sequence, row.num_prompt_tokens) for row in again.rows()] == [(0, 9)]


def test_requests_stay_in_the_order_of_their_opening() -> None:
    detokenizer = Detokenizer(byte_level())
    requests: list[OpenRequest] = [opened(request_id=bytes([i]) * 16) for i in range(3)]
    for request in requests:
        detokenizer.open(request, b"g")
    detokenizer.push(Log(requests[0]).add(0, [5], FinishReason.LENGTH).batch())
    assert list(detokenizer.live_requests()) == [requests[1].request_id, requests[2].request_id]
    detokenizer.forget(requests[1].request_id)
    assert list(detokenizer.live_requests()) == [requests[2].request_id]
    assert len(detokenizer) == 1


def test_a_sibling_has_its_own_requests_and_shares_the_counts() -> None:
    detokenizer = Detokenizer(byte_level())
    other = detokenizer.sibling()
    request = opened()
    other.open(request, b"g")
    assert (len(detokenizer), len(other)) == (0, 1)
    other.push(Log(request).add(0, [5]).batch())
    assert detokenizer.stats.num_tokens == 1


def test_a_request_that_fails_ends_everywhere_with_what_there_is() -> None:
    request = opened(n=3)
    detokenizer = Detokenizer(byte_level())
    detokenizer.open(request, b"g")
    log = Log(request).add(0, _ids("half a ")).add(1, _ids("x"), FinishReason.LENGTH)
    detokenizer.push(log.batch())
    error = RequestError(ErrorCode.INTERNAL, "the log is damaged")
    effects = detokenizer.fail(request.request_id, error)
    assert effects.cancels == [Cancellation(request.request_id, 0), Cancellation(request.request_id, 2)]
    (retired,) = effects.retirements
    ends = [sequence.end for sequence in retired.result.sequences]
    assert [end.error for end in ends] == [error, None, error]
    assert [end.reason for end in ends] == [FinishReason.ERROR, FinishReason.LENGTH, FinishReason.ERROR]
    assert not detokenizer.fail(request.request_id, error).retirements


def test_a_result_as_rows_is_the_whole_request() -> None:
    request = opened(n=2)
    log = Log(request).add(0, [5, 6]).add(1, _ids("the mill"), FinishReason.LENGTH)
    client, retired = run(Detokenizer(byte_level()), request, [*log, log.add(0, [7], FinishReason.STOP).last()])
    fresh = Client(2)
    for row in retired.rows().rows():
        fresh.take(row)
    assert (fresh.texts, fresh.token_ids) == (client.texts, client.token_ids)
    assert fresh.ends[0][3] == retired.usage


def test_the_header_comes_back_with_the_result() -> None:
    request = opened()
    _, retired = run(Detokenizer(byte_level()), request, Log(request).add(0, [5], FinishReason.LENGTH))
    assert retired.header == header()
