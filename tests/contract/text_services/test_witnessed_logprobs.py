"""Logprobs that clients had when a server lost its last writes come back with their tokens."""

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from contract.domain import chain
from contract.domain.errors import PoisonMessageError
from contract.domain.finish import FinishReason
from contract.domain.logprob_records import first_records, pack_records, unpack_records
from contract.domain.plan import Logprobs
from contract.domain.request import Header
from contract.domain.rows import TextRow, TokenLogprob, TokenRows
from detokenizer_svc.core.detokenizer import Detokenizer
from detokenizer_svc.core.request import OpenRequest
from gateway_svc.core.streams import ClientStream, DeliveredSequence, Refusal
from penstock.launcher.layout import BUNDLED_MODEL
from scheduler_svc.core.history import History, restore
from scheduler_svc.wire import decode_witness

ID = b"r" * 16
REQUEST = OpenRequest(Header(ID, "", 0, 1, 0, "", 7), 1, 3, wants_logprobs=True)
NUM_TOP = 2

_FLOAT = st.floats(max_value=0, width=32, allow_nan=False)
_U32 = st.integers(0, 2**32 - 1)
_ENTRIES = st.lists(
    st.builds(
        TokenLogprob,
        token_id=_U32,
        logprob=_FLOAT,
        top=st.lists(st.tuples(_U32, _FLOAT), max_size=3).map(tuple),
        rank=_U32,
    ),
    max_size=6,
)


@given(entries=_ENTRIES, data=st.data())
def test_records_are_read_as_they_were_written(entries: list[TokenLogprob], data: st.DataObject) -> None:
    packed = pack_records(entries)
    read = unpack_records(packed)
    assert read.sampled.tolist() == [each.logprob for each in entries]
    assert read.ranks.tolist() == [each.rank for each in entries]
    assert read.top_counts.tolist() == [len(each.top) for each in entries]
    tops = zip(read.top_ids.tolist(), read.top_logprobs.tolist(), strict=True)
    assert list(tops) == [top for each in entries for top in each.top]
    count = data.draw(st.integers(0, len(entries)))
    assert first_records(packed, count) == pack_records(entries[:count])
    # Records grow: what is there stays the beginning, which is all that its keeper looks at.
    assert packed.startswith(pack_records(entries[:count]))
    with pytest.raises(ValueError, match="records of"):
        first_records(packed, len(entries) + 1)
    if packed:
        with pytest.raises(ValueError, match=r"cut off|buffer size"):
            unpack_records(packed[: -data.draw(st.integers(1, 11))])


def test_damaged_records_are_poison() -> None:
    with pytest.raises(PoisonMessageError):
        decode_witness((b"\1\0\0\0", b"\xff" * 12), 1)


def rows_between(token_ids: Sequence[int], start: int, stop: int, finish: int = 0) -> TokenRows:
    """The log's rows of some tokens, one each, with logprobs that follow from their places."""
    places, count = np.arange(start, stop), stop - start
    return TokenRows(
        request_ids=[ID] * count,
        sequences=np.zeros(count, np.uint32),
        positions=places.astype(np.uint32),
        chains=np.array([chain.extend(chain.CHAIN_START, token_ids[:place]) for place in places.tolist()], np.uint64),
        counts=np.ones(count, np.uint32),
        token_ids=np.array(token_ids[start:stop], np.uint32),
        finishes=np.array([0] * (count - 1) + [finish], np.uint8),
        cached_tokens=np.zeros(count, np.uint32),
        logprobs=Logprobs(
            sampled=-places.astype(np.float32),
            ranks=places.astype(np.uint32) + 1,
            top_counts=np.full(count, NUM_TOP, np.uint32),
            top_ids=np.repeat(places, NUM_TOP).astype(np.uint32) + 5,
            top_logprobs=-np.repeat(places, NUM_TOP).astype(np.float32) / 2,
        ),
    )


def texts_of(detokenizer: Detokenizer, *batches: TokenRows) -> list[TextRow]:
    detokenizer.open(REQUEST, b"gateway")
    return [*itertools.chain.from_iterable(detokenizer.push(rows).rows() for rows in batches)]


@pytest.mark.parametrize(("num_logged", "num_client"), [(0, 0), (3, 2), (5, 5), (7, 1)])
def test_who_comes_back_with_less_than_the_gateway_told_gets_the_logprobs_of_the_rest(
    num_logged: int, num_client: int
) -> None:
    """Seven tokens were delivered, of which the log kept the first few; the client had read still fewer of them."""
    tokenizer = Tokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json"))
    token_ids = tokenizer.encode("the old mill stood beside the brook and slept").ids
    assert len(token_ids) > 8
    last = len(token_ids)
    undisturbed = texts_of(Detokenizer(tokenizer), rows_between(token_ids, 0, last, FinishReason.LENGTH))
    expected = [entry for row in undisturbed for entry in row.logprobs]

    gateway = ClientStream(1)
    for row in undisturbed[:7]:
        assert not isinstance(gateway.accept(row), Refusal)
    witness, told = decode_witness(gateway.witness(), 1)
    history = History()
    history.extend(np.array(token_ids[:num_logged], np.uint32))
    restored = restore(ID, [history], witness, told, lambda _: FinishReason.UNSPECIFIED, model_digest=b"")
    assert restored is not None
    assert len(restored.token_ids) == 7 - num_logged

    batches = [rows_between(token_ids, 0, num_logged)] if num_logged else []
    batches += [restored] if len(restored) else []
    again = texts_of(Detokenizer(tokenizer), *batches, rows_between(token_ids, 7, last, FinishReason.LENGTH))
    assert [entry for row in again for entry in row.logprobs] == expected

    num_chars = sum(len(row.text) for row in undisturbed[:num_client])
    known = chain.extend(chain.CHAIN_START, token_ids[:num_client])
    returning = ClientStream(1, [DeliveredSequence(num_client, num_chars, known, claim=num_client)])
    taken = [row for row in map(returning.accept, again) if isinstance(row, TextRow)]
    assert [entry for row in taken for entry in row.logprobs] == expected[num_client:]
    assert not any(math.isnan(entry.logprob) for row in taken for entry in row.logprobs)


def test_a_client_that_comes_back_to_its_gateway_leaves_its_logprobs_there() -> None:
    token_ids, stream = [5, 6, 7], ClientStream(1)
    rows = [
        TextRow(
            *(ID, 0, place, place, chain.extend(chain.CHAIN_START, token_ids[:place])),
            (token_id,),
            "x",
            logprobs=(TokenLogprob(token_id, -float(place), rank=place + 1),),
        )
        for place, token_id in enumerate(token_ids)
    ]
    for row in rows:
        stream.accept(row)
    records = pack_records(entry for row in rows for entry in row.logprobs)
    assert stream.witness()[1:] == (records,)
    known = chain.extend(chain.CHAIN_START, token_ids[:2])
    here, elsewhere = (ClientStream(1, [DeliveredSequence(2, 2, known, claim=2)]) for _ in range(2))
    here.remember(stream)
    here.accept(rows[2])
    assert here.witness() == stream.witness()
    # Who has never seen the first tokens cannot tell of any; from the start it can.
    elsewhere.accept(rows[2])
    assert elsewhere.witness() == (b"",)


def test_a_client_that_asked_for_no_logprobs_has_none_to_tell() -> None:
    stream = ClientStream(2)
    stream.accept(TextRow(ID, 0, 0, 0, chain.CHAIN_START, (5,), "x"))
    assert stream.witness() == (np.array([5], "<u4").tobytes(), b"")
