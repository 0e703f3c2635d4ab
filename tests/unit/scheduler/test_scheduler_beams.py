"""Requests with beams: outputs are those of a search alone, whatever else runs, dies or is short."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduling import EOS, Scheduling, make_request, request_id

from contract.domain.beams import BeamSearch
from contract.domain.errors import ErrorCode
from contract.domain.finish import CancelReason, FinishReason
from scheduler_svc.core.limits import WorkerLimits
from scheduler_svc.core.sequence import QueuedRequest

ROOMY = WorkerLimits(num_blocks=200, block_size=4, max_num_seqs=16, max_model_len=128, max_num_batched_tokens=64)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]


def with_beams(number: int, width: int, search: BeamSearch | None = None, **fields: object) -> QueuedRequest:
    fields = {"max_tokens": 9, "eos_token_ids": () if fields.pop("ignore_eos", False) else (EOS,), **fields}
    prompt = [(number * 7 + index) % 11 for index in range(9)]
    return replace(make_request(number, prompt, n=width, **fields), beams=search or BeamSearch())


@pytest.mark.parametrize("width", [1, 2, 3, 5])
@pytest.mark.parametrize("early", [False, True, "never"])
def test_outputs_are_those_of_a_search_alone(width: int, early: bool | str) -> None:
    run = Scheduling({"a": ROOMY})
    for number in range(6):
        run.add(with_beams(number, width, BeamSearch(1.0 - number / 2, early)))
    run.run()
    run.assert_nothing_is_left()


def test_a_step_of_a_beam_computes_one_token_and_copies_one_block() -> None:
    run = Scheduling({"a": ROOMY}, enable_prefix_caching=False)
    run.add(with_beams(1, 4, ignore_eos=True, max_tokens=8))
    run.run()
    worker = run.paged["a"]
    assert worker.num_computed == 9 + 4 * 7  # the prompt once, then a token of each beam
    assert worker.num_copies == 4 * 6  # but for the step in which the last block is full
    run.assert_nothing_is_left()


def test_beams_run_beside_others_and_never_ahead_of_their_choice() -> None:
    run = Scheduling({"a": ROOMY}, plans_in_flight=3)
    run.add(make_request(1, PROMPT, max_tokens=30))
    run.add(with_beams(2, 3, ignore_eos=True))
    run.run()
    run.assert_nothing_is_left()


def test_outputs_do_not_end_before_min_tokens() -> None:
    run = Scheduling({"a": ROOMY})
    for number in range(8):
        run.add(with_beams(number, 3, BeamSearch(early_stopping=True), min_tokens=5))
    run.run()
    run.assert_nothing_is_left()
    assert all(len(run.output(number, index)) > 5 for number in range(8) for index in range(3))


@pytest.mark.parametrize(
    "limits",
    [
        WorkerLimits(num_blocks=40, block_size=4, max_num_seqs=2, max_model_len=64, max_num_batched_tokens=64),
        WorkerLimits(num_blocks=7, block_size=4, max_num_seqs=8, max_model_len=24, max_num_batched_tokens=64),
        WorkerLimits(num_blocks=12, block_size=2, max_num_seqs=8, max_model_len=24, max_num_batched_tokens=3),
    ],
    ids=["slots", "blocks", "budget"],
)
def test_beams_for_which_there_is_no_room_wait_for_each_other(limits: WorkerLimits) -> None:
    run = Scheduling({"a": limits})
    for number in range(3):
        run.add(with_beams(number, 4, ignore_eos=number == 1))
    run.add(make_request(9, PROMPT, max_tokens=10))
    run.run()
    run.assert_nothing_is_left()


def test_beams_end_where_no_worker_can_hold_more() -> None:
    run = Scheduling({"a": replace(ROOMY, max_model_len=16)})
    run.add(with_beams(1, 3, ignore_eos=True, max_tokens=60))
    run.run()
    run.assert_nothing_is_left()
    assert [len(run.output(1, index)) for index in range(3)] == [7, 7, 7]


def test_beams_that_only_a_smaller_worker_is_left_for_end_as_they_are() -> None:
    big, small = replace(ROOMY, max_model_len=64), replace(ROOMY, max_model_len=14)
    run = Scheduling({"a": big})
    run.add(with_beams(1, 2, ignore_eos=True, max_tokens=20))
    for _ in range(10):
        run.step()
    run.remove_worker("a")
    run.limits["a"] = small
    run.add_worker("a")
    assert [run.finish(1, index) for index in range(2)] == [FinishReason.LENGTH] * 2
    assert {len(run.output(1, index)) for index in range(2)} == {10}
    assert not run.scheduler.requests


@pytest.mark.parametrize("num_steps", range(10))
def test_whoever_takes_over_goes_on_after_the_last_choice_in_the_log(num_steps: int) -> None:
    request = with_beams(1, 3)
    first = Scheduling({"a": ROOMY})
    first.add(request)
    for _ in range(num_steps):
        first.step()
    words = first.written[request_id(1), 3].tokens
    second = Scheduling({"a": ROOMY})
    second.add(replace(request, search_words=np.array(words, np.uint32), model_digest=b"" if words else None))
    second.run()
    second.requests[request_id(1)] = request
    second.assert_nothing_is_left()


def test_a_log_that_is_of_no_search_is_refused() -> None:
    request = with_beams(1, 2)
    for words in ([1, 2], [0, 3, 0], [0, 3, 0, 7, 3, 0, 0, 3, 0, 5, 5, 0]):
        with pytest.raises(ValueError, match=r"beams|search"):
            replace(request, search_words=np.array(words, np.uint32)).search()


def test_a_cancel_of_one_output_ends_all() -> None:
    run = Scheduling({"a": ROOMY})
    run.add(with_beams(1, 3, max_tokens=50, ignore_eos=True))
    for _ in range(4):
        run.step()
    run.cancel(1, sequence=2)
    assert [run.finish(1, index) for index in range(3)] == [FinishReason.CANCELLED] * 3
    assert not any(run.output(1, index) for index in range(3))
    run.run()
    run.assert_nothing_is_left()


def test_a_deadline_ends_a_search_between_its_steps() -> None:
    run = Scheduling({"a": ROOMY})
    run.add(with_beams(1, 3, max_tokens=50, deadline_ns=100))
    for _ in range(3):
        run.step()
    run.expire(100)
    assert run.written[request_id(1), 1].error is not None
    assert run.written[request_id(1), 1].error.code is ErrorCode.DEADLINE_EXCEEDED
    run.run()
    assert not run.scheduler.requests


def test_the_log_tells_once_since_when_a_search_has_its_slots() -> None:
    run = Scheduling({"a": ROOMY})
    run.add(with_beams(1, 3, ignore_eos=True))
    run.run()
    assert [(number, sequence, position) for number, sequence, position, _ in run.starts] == [(1, 3, 0)]


def test_beams_that_were_chosen_but_have_no_slot_yet_wait_when_the_worker_is_lost() -> None:
    run = Scheduling({"a": ROOMY})
    run.add(with_beams(1, 3))
    run.schedule()
    run.complete()
    run.remove_worker("a")
    run.add_worker("a")
    run.run()
    run.assert_nothing_is_left()


def test_outputs_name_the_model_that_computed_them() -> None:
    run = Scheduling({"a": ROOMY})
    run.remove_worker("a")
    run.add_worker("a", b"digest--")
    run.add(with_beams(1, 2))
    run.run()
    assert {run.written[request_id(1), index].model_digest for index in range(2)} == {b"digest--"}


OPERATIONS = st.lists(st.sampled_from("ssssssccllrpok"), min_size=5, max_size=60)


@settings(max_examples=60)
@given(OPERATIONS, st.integers(5, 30), st.integers(2, 8), st.integers(2, 20), st.booleans(), st.booleans())
def test_searches_survive_whatever_happens(  # noqa: PLR0917
    operations: list[str], num_blocks: int, num_slots: int, budget: int, has_cache: bool, has_state: bool
) -> None:
    limits = WorkerLimits(num_blocks, 4, num_slots, 20, budget, has_state=has_state)
    run = Scheduling({"a": limits, "b": limits}, enable_prefix_caching=has_cache)
    for number in range(3):
        run.add(with_beams(number, number + 2, ignore_eos=number == 1))
    run.add(make_request(9, PROMPT[:5], max_tokens=12))
    number = 10
    for operation in operations:
        match operation:
            case "s":
                run.schedule("a")
                run.complete("a")
                run.schedule("b")
            case "c":
                run.complete("b")
            case "l":
                run.remove_worker("a")
                run.add_worker("a")
            case "k":
                run.lose_worker("b")
                run.add_worker("b")
            case "r":
                run.redeliver("a")
            case "p":
                run.add(with_beams(number, 3))
                number += 1
            case "o":
                run.cancel(number - 1, CancelReason.CLIENT)
    run.run(1000)
    run.assert_nothing_is_left()
