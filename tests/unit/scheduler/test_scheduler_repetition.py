"""Outputs that may not repeat themselves."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduling import Scheduling, make_request, request_id

from contract.domain.finish import FinishReason
from contract.domain.repetition import RepetitionDetectionParams
from scheduler_svc.core.limits import WorkerLimits
from scheduler_svc.core.repetition import RepetitionDetector
from scheduler_svc.core.rows import finish_of

LIMITS = {"a": WorkerLimits(64, 4, 8, 200)}
TWICE = RepetitionDetectionParams(max_pattern_size=1, min_count=2)
PROMPT = [1, 2, 3]
make = partial(make_request, prompt=PROMPT)


def repeats(output: list[int], params: RepetitionDetectionParams) -> bool:
    """The definition, word by word."""
    for size in range(max(1, params.min_pattern_size), params.max_pattern_size + 1):
        total = size * params.min_count
        if len(output) >= total and output[-total:] == output[-size:] * params.min_count:
            return True
    return False


@given(
    output=st.lists(st.integers(0, 2), max_size=40),
    sizes=st.tuples(st.integers(0, 6), st.integers(1, 6)).filter(lambda sizes: sizes[0] <= sizes[1]),
    count=st.integers(2, 5),
)
def test_it_is_found_where_the_output_ends_with_a_pattern_so_many_times(
    output: list[int], sizes: tuple[int, int], count: int
) -> None:
    params = RepetitionDetectionParams(min_pattern_size=sizes[0], max_pattern_size=sizes[1], min_count=count)
    detector = RepetitionDetector(params)
    found = [detector.add(token_id) for token_id in output]
    assert found == [repeats(output[: end + 1], params) for end in range(len(output))]
    assert RepetitionDetector(params, output).has_found == (bool(found) and found[-1])


def undisturbed(*, number: int = 1) -> list[int]:
    scheduling = Scheduling(LIMITS)
    scheduling.add(make(number, max_tokens=60))
    scheduling.run()
    return scheduling.output(number)


def first_repetition(output: list[int], params: RepetitionDetectionParams, min_tokens: int = 0) -> int:
    return next(end for end in range(min_tokens + 1, len(output) + 1) if repeats(output[:end], params))


@pytest.mark.parametrize("min_tokens", [0, 20])
def test_the_output_ends_with_the_token_that_repeats_it_and_not_before_min_tokens(min_tokens: int) -> None:
    free = undisturbed()
    scheduling = Scheduling(LIMITS)
    scheduling.add(make(1, max_tokens=60, min_tokens=min_tokens, repetition_detection=TWICE))
    scheduling.add(make(2, max_tokens=60))
    scheduling.run()
    end = first_repetition(free, TWICE, min_tokens)
    assert end < 60
    assert (scheduling.output(1), scheduling.finish(1)) == (free[:end], FinishReason.REPETITION)
    assert (len(scheduling.output(2)), scheduling.finish(2)) == (60, FinishReason.LENGTH)
    assert scheduling.scheduler.stats().counters.num_finished_requests == {"repetition": 1, "length": 1}


def test_stop_ids_and_max_tokens_come_first() -> None:
    for number in range(1, 60):  # until one comes whose output repeats itself with the token that it repeats alone
        free = undisturbed(number=number)
        end = first_repetition(free, TWICE)
        if free.index(free[end - 1]) == end - 2:
            break
    for stopping, finish in (
        ({"max_tokens": end, "stop_token_ids": (11,)}, FinishReason.LENGTH),
        ({"max_tokens": 60, "stop_token_ids": (free[end - 1],)}, FinishReason.STOP),
    ):
        scheduling = Scheduling(LIMITS)
        scheduling.add(make(number, repetition_detection=TWICE, **stopping))
        scheduling.run()
        assert scheduling.finish(number) is finish


@given(cut=st.integers(0, 59))
@settings(max_examples=20)
def test_whoever_takes_it_over_ends_it_at_the_same_token(cut: int) -> None:
    free = undisturbed()
    end = first_repetition(free, TWICE)
    kept = free[: min(cut, end)]
    request = make(1, max_tokens=60, repetition_detection=TWICE)
    begun = replace(request, output_token_ids=(np.array(kept, np.uint32),))
    assert finish_of(begun, kept) == (FinishReason.REPETITION if len(kept) == end else FinishReason.UNSPECIFIED)
    scheduling = Scheduling(LIMITS)
    scheduling.add(begun)
    scheduling.run()
    assert scheduling.output(1) == free[:end]
    assert scheduling.written[request_id(1), 0].finish is FinishReason.REPETITION
