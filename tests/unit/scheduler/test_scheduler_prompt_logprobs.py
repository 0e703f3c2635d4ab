"""Requests that ask for logprobs of their prompts: one sequence computes the whole of it, until a result has told."""

from dataclasses import replace

import numpy as np
from scheduling import Scheduling, make_request

from contract.domain.finish import CancelReason
from contract.domain.params import Sampling
from contract.domain.plan import Admission
from scheduler_svc.core.limits import WorkerLimits
from scheduler_svc.core.sequence import QueuedRequest

PROMPT = list(range(1, 12))


def limits(num_blocks: int = 64) -> WorkerLimits:
    return WorkerLimits(num_blocks, 4, 8, 128)


def asking(number: int, prompt: list[int] = PROMPT, **fields: object) -> QueuedRequest:
    return replace(make_request(number, prompt, **fields), sampling=Sampling(num_prompt_logprobs=2))


def admissions(scheduling: Scheduling) -> list[Admission]:
    plan = scheduling.step()
    assert plan is not None
    return list(plan.admissions)


def test_nothing_is_read_from_the_prefix_cache_and_what_is_left_there_is_for_others() -> None:
    scheduling = Scheduling({"a": limits()}, plans_in_flight=1)
    scheduling.add(make_request(1, PROMPT, max_tokens=2))
    scheduling.run()
    scheduling.add(asking(2, max_tokens=2))
    (own,) = admissions(scheduling)
    assert (own.num_computed_tokens, own.prompt_logprobs) == (0, True)
    scheduling.add(make_request(3, PROMPT, max_tokens=2))
    (other,) = admissions(scheduling)
    assert (other.num_computed_tokens, other.prompt_logprobs) == (8, False)
    scheduling.run()
    scheduling.assert_nothing_is_left()


def test_of_several_samples_the_first_computes_them() -> None:
    scheduling = Scheduling({"a": limits()}, plans_in_flight=1)
    scheduling.add(asking(1, n=3, max_tokens=3))
    seen = [each for _ in range(3) for each in admissions(scheduling)]
    assert [each.prompt_logprobs for each in seen] == [True, False, False]
    assert [each.num_computed_tokens for each in seen] == [0, 10, 10]


def test_who_loses_its_slot_before_its_first_token_computes_them_again_and_later_not() -> None:
    scheduling = Scheduling({"a": limits()}, max_num_batched_tokens=8, plans_in_flight=1)
    scheduling.add(asking(1, max_tokens=8))
    assert [each.prompt_logprobs for each in admissions(scheduling)] == [True]
    scheduling.lose_worker("a")
    scheduling.add_worker("a")
    assert [each.prompt_logprobs for each in admissions(scheduling)] == [True]
    scheduling.step()
    assert len(scheduling.output(1)) == 1
    scheduling.lose_worker("a")
    scheduling.add_worker("a")
    assert [each.prompt_logprobs for each in admissions(scheduling)] == [False]


def test_who_takes_a_request_over_computes_them_once_more() -> None:
    """It cannot know whether they are there."""
    scheduling = Scheduling({"a": limits()}, plans_in_flight=1)
    outputs = (np.array([5], np.uint32), np.array([6, 7], np.uint32))
    scheduling.add(replace(asking(1, n=2, max_tokens=9), output_token_ids=outputs))
    taken = admissions(scheduling)
    assert [each.prompt_logprobs for each in taken] == [True, False]
    assert taken[0].num_computed_tokens == 0


def test_where_the_first_sample_has_ended_the_next_computes_them() -> None:
    scheduling = Scheduling({"a": limits()}, plans_in_flight=1)
    outputs = (np.array([5], np.uint32), np.array([6, 7], np.uint32))
    ended = frozenset((0,))
    scheduling.add(replace(asking(1, n=2, max_tokens=9), output_token_ids=outputs, ended_sequences=ended))
    assert [each.prompt_logprobs for each in admissions(scheduling)] == [True]


def test_a_row_of_another_sample_says_nothing_of_them() -> None:
    scheduling = Scheduling({"a": limits()}, max_num_batched_tokens=16, plans_in_flight=1)
    outputs = (np.array([5], np.uint32), np.array([6], np.uint32))
    scheduling.add(replace(asking(1, n=2, max_tokens=9), output_token_ids=outputs))
    assert [each.prompt_logprobs for each in admissions(scheduling)] == [True, False]
    scheduling.cancel(1, CancelReason.STOP, sequence=0)
    request = next(iter(scheduling.scheduler.requests.values()))
    told_before = request.needs_prompt_logprobs
    scheduling.step()
    assert request.needs_prompt_logprobs == told_before
