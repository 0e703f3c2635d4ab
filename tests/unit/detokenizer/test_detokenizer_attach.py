"""Clients that come back are told the rest, whatever they have."""

import pytest
from detokenizer_log import Log, opened
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers_under_test import byte_level

from contract.domain.chain import CHAIN_START, extend
from contract.domain.errors import ErrorCode
from contract.domain.finish import FinishReason
from contract.domain.params import TextOptions
from detokenizer_svc.core.detokenizer import Detokenizer
from detokenizer_svc.core.sequence import Offset
from detokenizer_svc.core.textrows import text_rows

_NO_ROWS = text_rows([])


@settings(max_examples=80)
@given(
    data=st.data(),
    ids=st.lists(st.integers(1, 424), max_size=16),
    stop=st.sampled_from([(), ("the", "a")]),
)
def test_attaching_at_any_offset_gives_exactly_the_rest(
    data: st.DataObject, ids: list[int], stop: tuple[str, ...]
) -> None:
    request = opened(n=2, text=TextOptions(stop))
    log = list(Log(request).cut(data, ids, FinishReason.LENGTH))
    detokenizer = Detokenizer(byte_level())
    detokenizer.open(request, b"old")
    rows = [row for batch in log for row in detokenizer.push(batch).texts.get(b"old", _NO_ROWS).rows()]
    # What a client has is some of the rows in order.
    have = data.draw(st.integers(0, len(rows)))
    text, tokens, end, chain = "", 0, None, None
    known = CHAIN_START
    for row in rows[:have]:
        text, tokens, end = text + row.text, tokens + len(row.token_ids), row.finish or None
        known = extend(known, row.token_ids)
    effects = detokenizer.attach(request.request_id, b"new", [Offset(tokens, len(text), known)])
    assert set(effects.texts) <= {b"new"}
    for row in effects.texts.get(b"new", _NO_ROWS).rows():
        assert row.token_offset == tokens
        assert row.text_offset == len(text)
        text, tokens, end, chain = text + row.text, tokens + len(row.token_ids), row.finish or None, row.chain
    assert text == "".join(row.text for row in rows)
    assert tokens == sum(len(row.token_ids) for row in rows)
    assert end == (rows[-1].finish or None if rows else None)
    if chain is not None and have < len(rows) and rows[have].token_offset == tokens:
        assert chain == rows[have].chain
    # From now on text goes to the new route.
    after = detokenizer.push(Log(request).add(1, [5]).batch())
    assert list(after.texts) == [b"new"]


def test_who_comes_behind_the_end_is_told_of_the_result() -> None:
    request = opened()
    detokenizer = Detokenizer(byte_level())
    detokenizer.open(request, b"g")
    ended = detokenizer.push(Log(request).add(0, [5], FinishReason.LENGTH).batch())
    assert list(ended.texts) == [b"g"]
    effects = detokenizer.attach(request.request_id, b"g2")
    assert effects.results == [(b"g2", request.request_id)]
    assert not effects.texts
    assert not detokenizer.attach(b"?" * 16, b"g2").results


def test_attaching_ahead_of_the_log_waits_for_it() -> None:
    request = opened()
    detokenizer = Detokenizer(byte_level())
    detokenizer.open(request, b"g")
    detokenizer.push(Log(request).add(0, [5]).batch())
    ahead = Offset(3, 4, extend(CHAIN_START, (5, 6, 7)))
    assert not detokenizer.attach(request.request_id, b"g2", [ahead]).texts
    assert not detokenizer.attach(b"?" * 16, b"g2", [ahead]).texts
    effects = detokenizer.push(Log(request).add(0, [5]).add(0, [6, 7, 8]).batch())
    (row,) = effects.texts[b"g2"].rows()
    assert (row.token_offset, row.token_ids) == (1, (6, 7, 8)), "of which the client takes the last one"


@pytest.mark.parametrize(
    ("num_tokens", "claimed"), [(1, (6,)), (2, (5, 7)), (3, (5, 6, 8))], ids=["behind", "between", "at the tip"]
)
def test_a_client_of_another_history_is_told_so_and_nothing_is_spliced(
    num_tokens: int, claimed: tuple[int, ...]
) -> None:
    request = opened()
    detokenizer = Detokenizer(byte_level())
    detokenizer.open(request, b"g")
    detokenizer.push(Log(request).add(0, [5, 6, 7]).batch())
    claim = Offset(num_tokens, 4, extend(CHAIN_START, claimed))
    (row,) = detokenizer.attach(request.request_id, b"g2", [claim]).texts[b"g2"].rows()
    assert (row.token_offset, row.text_offset, row.chain) == claim, "so that exactly this client takes it"
    assert (row.token_ids, row.text, row.finish) == ((), "", FinishReason.ERROR)
    assert row.error is not None
    assert row.error.code is ErrorCode.STREAM_DIVERGED
    assert request.request_id in detokenizer, "others may have its beginning"


def test_a_client_that_has_more_than_an_ended_sequence_is_told_so() -> None:
    request = opened(n=2)
    detokenizer = Detokenizer(byte_level())
    detokenizer.open(request, b"g")
    detokenizer.push(Log(request).add(0, [5, 6], FinishReason.LENGTH).batch())
    claim = Offset(3, 4, extend(CHAIN_START, (5, 6, 7)))
    (row,) = detokenizer.attach(request.request_id, b"g", [claim]).texts[b"g"].rows()
    assert row.error is not None
    assert row.error.code is ErrorCode.STREAM_DIVERGED
