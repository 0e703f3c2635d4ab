"""Times of a request that the log tells are in its result."""

from detokenizer_log import Log, opened
from tokenizers_under_test import byte_level

from contract.domain.finish import FinishReason
from contract.domain.timeline import MAX_RUNS, Computed, Run, Start, StartReason, Timeline
from detokenizer_svc.core.detokenizer import Detokenizer
from detokenizer_svc.core.request import OpenRequest

FIRST, MOVED = Computed("a", b"a" * 16, 4, 400), Computed("b", b"b" * 16, 1, 900)


def _detokenizer(request: OpenRequest) -> Detokenizer:
    detokenizer = Detokenizer(byte_level())
    detokenizer.open(request)
    return detokenizer


def test_a_result_tells_every_slot_that_a_sequence_had_and_when_it_ended() -> None:
    request = opened(tokenizing_ns=100, tokenized_ns=200, opened_ns=300)
    first, moved = Start(350, StartReason.FIRST), Start(800, StartReason.WORKER_LOST)
    log = Log(request).add(0, [5], start=first).add(0, [6]).add(0, [7], start=moved)
    log.add(0, [8], FinishReason.LENGTH)
    detokenizer = _detokenizer(request)
    *before, last = zip(log, (FIRST, FIRST._replace(step=5), MOVED, Computed("b", b"b" * 16, 2, 950)), strict=True)
    assert not any(detokenizer.push(rows, computed).retirements for rows, computed in before)
    (retirement,) = detokenizer.push(*last).retirements
    runs = [Run(0, 0, first, FIRST), Run(0, 2, moved, MOVED)]
    timeline = retirement.result.timeline
    assert timeline == Timeline(100, 200, 300, runs, finished_ns=950)
    assert (timeline.admitted_ns, timeline.first_token_ns) == (350, 400)


def test_a_row_that_comes_twice_is_one_start() -> None:
    request = opened()
    log = Log(request).add(0, [5], start=Start(350, StartReason.FIRST))
    detokenizer = _detokenizer(request)
    detokenizer.push(log.batch(), FIRST)
    detokenizer.push(log.batch(), MOVED)
    (retirement,) = detokenizer.push(log.add(0, [6], FinishReason.LENGTH).last(), MOVED).retirements
    assert [run.computed for run in retirement.result.timeline.runs] == [FIRST]


def test_of_very_many_starts_the_first_are_kept_and_the_others_counted() -> None:
    request = opened()
    log = Log(request)
    for number in range(MAX_RUNS + 3):
        log.add(0, [5], start=Start(number + 1, StartReason.PREEMPTED))
    detokenizer = _detokenizer(request)
    (retirement,) = detokenizer.push(log.add(0, [6], FinishReason.LENGTH).batch(), FIRST).retirements
    timeline = retirement.result.timeline
    assert [run.start.at_ns for run in timeline.runs] == list(range(1, MAX_RUNS + 1))
    assert timeline.num_more_runs == 3
