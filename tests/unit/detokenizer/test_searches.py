"""Requests with beams: their searches have no text, and checkpoints keep them for whoever goes on."""

import dataclasses

import numpy as np
from detokenizer_log import Log, opened, run
from tokenizers_under_test import byte_level

from contract.domain.finish import FinishReason
from contract.domain.plan import Logprobs
from contract.domain.timeline import Start, StartReason
from detokenizer_svc import wire
from detokenizer_svc.core.detokenizer import Detokenizer
from scheduler_svc.wire import read_histories

REQUEST = opened(n=2, has_search=True)
SEARCH = 2
WORDS = [[0, 65, 7, 0, 66, 9], [1, 67, 8, 0, 68, 9]]


def searched() -> Log:
    log = Log(REQUEST).add(SEARCH, WORDS[0], cached_tokens=3, start=Start(5, StartReason.FIRST))
    return log.add(SEARCH, WORDS[1], start=Start(6, StartReason.WORKER_LOST))


def with_ends() -> Log:
    return searched().add(0, [65, 66], FinishReason.LENGTH).add(1, [67], FinishReason.STOP)


def test_a_search_has_no_text_and_its_outputs_come_as_they_end() -> None:
    client, result = run(Detokenizer(byte_level()), REQUEST, with_ends())
    assert client.token_ids == [[65, 66], [67]]
    assert client.texts == [sequence.text for sequence in result.sequences]
    assert client.texts[0]
    assert not client.texts[1], "the token that ended it is hidden"
    usage = result.usage
    assert (usage.num_output_tokens, usage.num_cached_tokens) == (3, 3)
    assert [(each.sequence, each.position) for each in result.timeline.runs] == [(SEARCH, 0), (SEARCH, 0)]


def test_nothing_is_sent_of_a_search_and_a_row_that_comes_twice_counts_once() -> None:
    detokenizer = Detokenizer(byte_level())
    detokenizer.open(REQUEST, b"g")
    for rows in [*searched(), *searched()]:
        effects = detokenizer.push(rows)
        assert not effects.texts
        assert not effects.gaps
    assert detokenizer.checkpoint(REQUEST.request_id).token_ids.tolist() == WORDS[0] + WORDS[1]
    assert not len(detokenizer.snapshot(REQUEST.request_id))


def test_a_gap_in_a_search_is_told() -> None:
    detokenizer = Detokenizer(byte_level())
    detokenizer.open(REQUEST, b"g")
    assert detokenizer.push(searched().last()).gaps == [REQUEST.request_id]


def test_whoever_goes_on_after_a_checkpoint_has_the_search() -> None:
    detokenizer = Detokenizer(byte_level())
    detokenizer.open(REQUEST, b"g")
    detokenizer.push(searched().batch())
    payload = wire.encode_checkpoint(detokenizer.checkpoint(REQUEST.request_id), b"s" * 16, 1)
    histories = read_histories([payload], {REQUEST.request_id: 3})[REQUEST.request_id]
    assert [history.token_ids for history in histories] == [[], [], WORDS[0] + WORDS[1]]
    successor = detokenizer.sibling()
    successor.open(REQUEST, b"g")
    successor.push(wire.decode_tokens(payload)[1])
    for rows in list(with_ends())[2:]:
        effects = successor.push(rows)
    assert len(effects.retirements) == 1


def test_a_checkpoint_keeps_the_logprobs_of_outputs_beside_the_words_of_the_search() -> None:
    request = dataclasses.replace(REQUEST, wants_logprobs=True)
    detokenizer = Detokenizer(byte_level())
    detokenizer.open(request, b"g")
    detokenizer.push(searched().batch())
    ended = list(with_ends())[2]
    told = dataclasses.replace(ended, logprobs=Logprobs.sampled_alone(np.array([-0.5, -0.25], np.float32)))
    detokenizer.push(told)
    kept = wire.decode_tokens(wire.encode_checkpoint(detokenizer.checkpoint(request.request_id), b"s" * 16, 1))[1]
    successor = detokenizer.sibling()
    successor.open(request, b"g")
    effects = [*successor.push(kept).rows(), *successor.push(list(with_ends())[3]).rows()]
    assert [[entry.logprob for entry in row.logprobs] for row in effects] == [[-0.5, -0.25], []]


def test_rows_of_a_search_that_nobody_asked_for_are_stray() -> None:
    detokenizer = Detokenizer(byte_level())
    detokenizer.open(dataclasses.replace(REQUEST, has_search=False), b"g")
    detokenizer.push(searched().batch())
    assert detokenizer.stats.num_unknown_rows == 2
