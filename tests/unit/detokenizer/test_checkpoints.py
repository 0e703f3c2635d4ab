"""A checkpoint and the rest of the log lead to what the whole log leads to, wherever the log is cut."""

import dataclasses

import numpy as np
from detokenizer_log import Client, Log, opened
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers_under_test import byte_level, llama2

from contract.domain.errors import ErrorCode
from contract.domain.finish import FinishReason, RequestError, Usage
from contract.domain.params import TextOptions
from contract.domain.plan import Logprobs
from contract.domain.rows import TokenRows
from contract.domain.timeline import Computed, Start, StartReason
from detokenizer_svc import wire
from detokenizer_svc.core.detokenizer import Detokenizer
from detokenizer_svc.core.effects import Cancellation, Effects
from detokenizer_svc.core.request import FinishedRequest, OpenRequest
from scheduler_svc.wire import read_histories

EOS = 0
ROUTE = b"g"
_ERROR = RequestError(ErrorCode.INTERNAL, "the worker is broken", "x")
_ENDS = [FinishReason.LENGTH, FinishReason.STOP, FinishReason.CANCELLED, FinishReason.ERROR]
_PIECES = st.lists(st.lists(st.integers(1, 424), min_size=1, max_size=4), max_size=6)


def _with_logprobs(rows: TokenRows) -> TokenRows:
    """Each token with as many alternatives as its id says."""
    token_ids = rows.token_ids
    counts = token_ids % 3
    top_ids = np.repeat(token_ids, counts)
    top_logprobs = -top_ids.astype(np.float32) / 5
    columns = Logprobs(-token_ids.astype(np.float32) / 7, token_ids + np.uint32(1), counts, top_ids, top_logprobs)
    return dataclasses.replace(rows, logprobs=columns)


def _restored(detokenizer: Detokenizer, request: OpenRequest) -> tuple[Detokenizer, Effects]:
    """A successor that has read the checkpoint as it is stored."""
    payload = wire.encode_checkpoint(detokenizer.checkpoint(request.request_id), b"s" * 16, 1)
    computed, rows = wire.decode_tokens(payload)
    assert rows.timeline is not None
    successor = detokenizer.sibling()
    successor.open(dataclasses.replace(request, opened_ns=0), ROUTE)
    successor.recall(request.request_id, rows.timeline)
    return successor, successor.push(rows, computed)


def _columns(result: FinishedRequest) -> list[object]:
    """All of a result, as values that can be compared."""
    found: list[object] = [result.usage, result.timeline]
    for sequence in result.sequences:
        logprobs = sequence.logprobs
        columns = () if logprobs is None else dataclasses.astuple(logprobs.columns())
        found.append((sequence.text, sequence.token_ids.tolist(), sequence.end))
        found.append(([column.tolist() for column in columns], [] if logprobs is None else logprobs.token_bytes()))
    return found


@settings(max_examples=150)
@given(
    data=st.data(),
    pieces=st.tuples(_PIECES, _PIECES),
    stops=st.lists(st.sampled_from(["a", "the", "e m", "\ufffd", "日", "本語"]), max_size=2),
    include=st.booleans(),
    wants_logprobs=st.booleans(),
    bytes_fall_back=st.booleans(),
)
def test_whoever_reads_checkpoints_ends_requests_as_whoever_read_all(  # noqa: PLR0917
    data: st.DataObject,
    pieces: tuple[list[list[int]], list[list[int]]],
    stops: list[str],
    include: bool,
    wants_logprobs: bool,
    bytes_fall_back: bool,
) -> None:
    tokenizer = llama2() if bytes_fall_back else byte_level()
    options = TextOptions(tuple(stops), include)
    request = opened(
        n=2, text=options, wants_logprobs=wants_logprobs, eos_token_ids=(EOS,), stop_token_ids=(7,), opened_ns=3
    )
    log = Log(request)
    left = [list(each) for each in pieces]
    while any(left):
        sequence = data.draw(st.sampled_from([i for i in (0, 1) if left[i]]))
        start = data.draw(st.none() | st.builds(Start, st.integers(1, 99), st.sampled_from(StartReason)))
        log.add(sequence, left[sequence].pop(0), cached_tokens=5, start=start)
    for sequence in (0, 1):
        finish = data.draw(st.sampled_from(_ENDS))
        last = data.draw(st.sampled_from([[], [EOS], [7], [3, 4]]))
        log.add(sequence, last, finish, _ERROR if finish is FinishReason.ERROR else None)
    batches = [_with_logprobs(rows) if wants_logprobs else rows for rows in log]

    undisturbed = Detokenizer(tokenizer)
    undisturbed.open(request, ROUTE)
    whole, parts = Client(2), Client(2)
    expected = []
    for step, rows in enumerate(batches, 1):
        effects = undisturbed.push(rows, Computed("w", b"i" * 16, step, 1000 + step))
        expected += effects.retirements
        for row in effects.rows():
            whole.take(row)

    reader = Detokenizer(tokenizer)
    reader.open(request, ROUTE)
    found = []
    for step, rows in enumerate(batches, 1):
        if request.request_id in reader and data.draw(st.booleans()):
            reader, effects = _restored(reader, request)
            assert not effects.retirements, "who wrote the checkpoint has not seen the end"
        effects = reader.push(rows, Computed("w", b"i" * 16, step, 1000 + step))
        found += effects.retirements
        for row in effects.rows():
            parts.take(row)
    assert parts == whole
    assert [_columns(each.result) for each in found] == [_columns(each.result) for each in expected]
    assert len(found) == 1


@settings(max_examples=100)
@given(data=st.data(), pieces=_PIECES, end=st.sampled_from([None, *_ENDS]))
def test_a_scheduler_finds_in_a_checkpoint_what_it_would_find_in_the_log(
    data: st.DataObject, pieces: list[list[int]], end: FinishReason | None
) -> None:
    request = opened(n=2)
    log = Log(request).add(1, [9])
    for piece in pieces:
        log.add(0, piece)
    if end is not None:
        log.add(0, data.draw(st.sampled_from([[], [8]])), end)
    detokenizer = Detokenizer(byte_level())
    detokenizer.open(request, ROUTE)
    detokenizer.push(log.batch())
    payloads = [
        wire.encode_checkpoint(rows, b"s" * 16, 1) for rows in (detokenizer.checkpoint(request.request_id), log.batch())
    ]
    from_checkpoint, from_log = (read_histories([each], {request.request_id: 2}) for each in payloads)
    assert from_checkpoint == from_log
    assert from_checkpoint == read_histories(payloads, {request.request_id: 2}), "rows in both count once"


def test_a_stop_string_is_found_again_in_a_checkpoint() -> None:
    request = opened(n=2, text=TextOptions(("mill",)))
    ids = byte_level().encode("the old mill stood").ids
    detokenizer = Detokenizer(byte_level())
    detokenizer.open(request, ROUTE)
    detokenizer.push(Log(request).add(0, ids).batch())
    checkpoint = detokenizer.checkpoint(request.request_id)
    assert checkpoint.finishes.tolist() == [FinishReason.UNSPECIFIED], "the log told no end"
    assert "mill" in byte_level().decode(checkpoint.token_ids.tolist())
    assert len(checkpoint.token_ids) < len(ids), "what comes behind the end is nobody's"
    successor, effects = _restored(detokenizer, request)
    assert effects.cancels == [Cancellation(request.request_id, 0)]
    (row,) = successor.snapshot(request.request_id).rows()
    assert (row.text, row.stop_reason) == ("the old ", "mill")


def test_an_end_without_tokens_keeps_its_own_row() -> None:
    # The last token of a row that stops is hidden; one that came before such a row is not.
    request = opened(n=2, eos_token_ids=(EOS,))
    ids = byte_level().encode("ab").ids
    for log, text in (
        (Log(request).add(0, ids).add(0, [], FinishReason.STOP), "ab"),
        (Log(request).add(0, [*ids, EOS], FinishReason.STOP), "ab"),
        (Log(request).add(0, ids, FinishReason.STOP), byte_level().decode(ids[:-1])),
    ):
        detokenizer = Detokenizer(byte_level())
        detokenizer.open(request, ROUTE)
        detokenizer.push(log.batch())
        successor, _ = _restored(detokenizer, request)
        (row,) = successor.snapshot(request.request_id).rows()
        assert (row.text, row.finish) == (text, FinishReason.STOP)


def test_a_request_without_rows_has_an_empty_checkpoint() -> None:
    request = opened(n=3, wants_logprobs=True)
    detokenizer = Detokenizer(byte_level())
    detokenizer.open(request, ROUTE)
    assert len(detokenizer.checkpoint(request.request_id)) == 0
    successor, effects = _restored(detokenizer, request)
    assert not list(effects.rows())
    assert request.request_id in successor


def test_usage_survives() -> None:
    request = opened()
    detokenizer = Detokenizer(byte_level())
    detokenizer.open(request, ROUTE)
    log = Log(request).add(0, [5, 6], cached_tokens=4)
    detokenizer.push(log.batch())
    successor, _ = _restored(detokenizer, request)
    (retired,) = successor.push(log.add(0, [7], FinishReason.LENGTH).last()).retirements
    assert retired.result.usage == Usage(7, 3, 4)
