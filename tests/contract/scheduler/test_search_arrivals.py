"""A request with beams as whoever goes on with it reads it: request, log and what its client has."""

import dataclasses

import numpy as np
import pytest

from contract.domain import chain
from contract.domain.errors import ErrorCode, PoisonMessageError
from contract.domain.finish import FinishReason
from contract.domain.logprob_records import pack_records
from contract.domain.params import SamplingParams
from contract.domain.request import Header, Prompt, Request
from contract.domain.rows import TokenLogprob, TokenRows
from contract.domain.timeline import Computed
from gateway_svc.wire import encode_header, encode_request
from scheduler_svc.arrival import read_arrival
from scheduler_svc.core.beams import Candidate, pack
from scheduler_svc.wire import encode_rows, read_histories, read_loaded
from servicekit.bus import keys
from servicekit.bus.calls import Entry, Loaded, RequestState, StoredRequest
from tokenizer_svc.core.tokenize import TokenizedPrompt
from tokenizer_svc.wire import encode_tokenized

ID, EOS, MODEL = b"r" * 16, 9, b"model---"
PROMPT = np.array([5, 6], np.uint32)
PARAMS = SamplingParams(n=2, use_beam_search=True, max_tokens=4)
WORDS = pack([Candidate(0, 7, np.float32(-0.5)), Candidate(0, EOS, np.float32(-1)), Candidate(0, 8, np.float32(-2))])


def stored(
    params: SamplingParams = PARAMS, eos: tuple[int, ...] = (EOS,), witness: tuple[bytes, ...] = ()
) -> StoredRequest:
    header = Header(ID, "", 0, 0, 0, "", 0)
    body = encode_request(Request(header, "m", Prompt(token_ids=(5, 6)), params))
    meta = encode_tokenized(TokenizedPrompt(PROMPT, eos, params.stopping))
    return StoredRequest(
        ID,
        "",
        RequestState.RUNNING,
        encode_header(header),
        body,
        meta,
        b"",
        0,
        None,
        0,
        0,
        0,
        witness,
        MODEL,
        token_ids=PROMPT.astype("<u4").tobytes(),
    )


def row(sequence: int, token_ids: np.ndarray, finish: FinishReason = FinishReason.UNSPECIFIED) -> bytes:
    rows = TokenRows(
        request_ids=[ID],
        sequences=np.array([sequence], np.uint32),
        positions=np.zeros(1, np.uint32),
        chains=np.array([chain.CHAIN_START], np.uint64),
        counts=np.array([len(token_ids)], np.uint32),
        token_ids=np.asarray(token_ids, np.uint32),
        finishes=np.array([finish], np.uint8),
        cached_tokens=np.zeros(1, np.uint32),
        model_digest=MODEL,
    )
    return encode_rows(rows, b"s" * 16, Computed(sent_ns=1))


def loaded(request: StoredRequest, *rows: bytes) -> Loaded:
    entries = [Entry(b"%d-0" % index, {keys.PAYLOAD: payload}) for index, payload in enumerate(rows)]
    return Loaded([request], {0: entries})


def test_a_search_goes_on_after_the_choices_in_the_log() -> None:
    ((request, histories),) = read_loaded(loaded(stored(), row(2, WORDS)))
    arrival = read_arrival(request, histories)
    assert arrival.request is not None
    assert not len(arrival.rows)
    assert arrival.request.model_digest == MODEL
    search = arrival.request.search()
    assert search is not None
    assert [beam.token_ids.tolist() for beam in search.beams.running] == [[7], [8]]
    assert [each.token_ids.tolist() for each in search.beams.finished] == [[EOS]]


def test_a_search_whose_outputs_have_ended_is_over() -> None:
    ends = row(0, np.array([7, EOS]), FinishReason.STOP), row(1, np.array([8, 7, 7, 7]), FinishReason.LENGTH)
    assert not read_loaded(loaded(stored(), row(2, WORDS), *ends))
    assert read_loaded(loaded(stored(), row(2, WORDS), ends[0]))


def test_outputs_that_a_client_has_are_written_into_the_log_with_their_ends() -> None:
    witness = tuple(np.array(each, "<u4").tobytes() for each in ([7, EOS], [8, 7]))
    ((request, histories),) = read_loaded(loaded(stored(witness=witness), row(2, WORDS)))
    arrival = read_arrival(request, histories)
    assert arrival.rows.sequences.tolist() == [0, 1]
    # Nothing of an output is told before its end, wherever that is.
    assert arrival.rows.finishes.tolist() == [FinishReason.STOP, FinishReason.LENGTH]
    assert arrival.request is not None
    assert arrival.request.ended_sequences == {0, 1}


def test_so_are_their_logprobs() -> None:
    entries = [TokenLogprob(7, -0.5), TokenLogprob(EOS, -0.25)]
    witness = (np.array([7, EOS], "<u4").tobytes(), b"", pack_records(entries), b"")
    ((request, histories),) = read_loaded(loaded(stored(witness=witness), row(2, WORDS)))
    arrival = read_arrival(request, histories)
    assert arrival.rows.logprobs is not None
    assert arrival.rows.logprobs.sampled.tolist() == [-0.5, -0.25]


def test_a_client_that_has_another_history_ends_the_outputs_alone() -> None:
    histories = read_histories([row(0, np.array([8])), row(2, WORDS)], {ID: 3})[ID]
    arrival = read_arrival(stored(witness=(np.array([7], "<u4").tobytes(), b"")), histories)
    assert arrival.request is None
    assert arrival.rows.sequences.tolist() == [0, 1]
    assert {error.code for error in arrival.rows.errors.values()} == {ErrorCode.STREAM_DIVERGED}


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (stored(), WORDS[:3]),
        (stored(), np.array([3, 7, 0, 0, 8, 0])),
        (stored(SamplingParams(n=16, use_beam_search=True, max_tokens=4), (1, 2, 3, 4, 5)), np.empty(0)),
        (stored(dataclasses.replace(PARAMS, max_tokens=None)), np.empty(0)),
    ],
    ids=["cut", "parent", "candidates", "endless"],
)
def test_a_search_that_cannot_be_one_is_poison(request_: StoredRequest, words: np.ndarray) -> None:
    histories = read_histories([row(2, words)], {ID: 3})[ID]
    with pytest.raises(PoisonMessageError):
        read_arrival(request_, histories)
