"""In a burst of prompts a few steps leave out what decodes."""

import pytest
from scheduling import Scheduling, make_request

from contract.domain.plan import StepPlan
from scheduler_svc.core.limits import WorkerLimits
from scheduler_svc.core.prefill_only import PrefillOnly


def decoding(max_prefill_only_steps: int = 3, max_num_seqs: int = 16, policy: str = "fcfs") -> Scheduling:
    """Two sequences that decode, on a worker whose steps have ten tokens."""
    scheduling = Scheduling(
        {"a": WorkerLimits(num_blocks=256, block_size=4, max_num_seqs=max_num_seqs, max_model_len=400)},
        max_num_batched_tokens=10,
        plans_in_flight=1,
        max_prefill_only_steps=max_prefill_only_steps,
        scheduling_policy=policy,
    )
    for number in (1, 2):
        scheduling.add(make_request(number, [number, 3], max_tokens=300))
    scheduling.step()
    return scheduling


def counts(plan: StepPlan | None) -> list[int]:
    assert plan is not None
    return plan.num_tokens.tolist()


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_what_decodes_waits_for_three_steps_while_prompts_fill_them_and_more_wait(policy: str) -> None:
    scheduling = decoding(policy=policy)
    for number in range(3, 13):
        scheduling.add(make_request(number, [number % 7] * 7, max_tokens=20))
    steps = [counts(scheduling.step()) for _ in range(4)]
    assert steps[:3] == [[7, 3], [4, 6], [1, 7, 2]]
    # The two of before, and the four whose prompts are computed; then prompts.
    assert steps[3] == [1, 1, 1, 1, 1, 1, 4]
    scheduling.run()
    scheduling.assert_nothing_is_left()


def test_a_prompt_that_fills_several_steps_is_computed_alone_in_the_first_of_them() -> None:
    scheduling = decoding()
    scheduling.add(make_request(3, [5] * 60, max_tokens=20))
    steps = [counts(scheduling.step()) for _ in range(5)]
    assert steps == [[10], [10], [10], [1, 1, 8], [10]]


def test_what_decodes_is_in_each_step_if_little_waits_beyond_it() -> None:
    scheduling = decoding()
    scheduling.add(make_request(3, [5] * 12, max_tokens=20))
    # Four tokens are left after the first eight: less than half a step.
    assert [counts(scheduling.step()) for _ in range(2)] == [[1, 1, 8], [1, 1, 4]]


def test_what_decodes_is_in_each_step_if_the_others_find_no_slot() -> None:
    scheduling = decoding(max_num_seqs=3)
    for number in range(3, 9):
        scheduling.add(make_request(number, [5] * 7, max_tokens=20))
    assert [counts(scheduling.step()) for _ in range(3)] == [[1, 1, 7], [1, 1, 1], [1, 1, 1]]


def test_a_setting_puts_what_decodes_into_each_step() -> None:
    scheduling = decoding(max_prefill_only_steps=0)
    scheduling.add(make_request(3, [5] * 60, max_tokens=20))
    assert [counts(scheduling.step()) for _ in range(3)] == [[1, 1, 8]] * 3


def test_prompts_without_end_leave_what_decodes_out_of_few_steps_only() -> None:
    scheduling = decoding()
    num_left_out, number = 0, 3
    for _ in range(290):
        scheduling.add(make_request(number, [int(digit) for digit in f"{number:09}"[::-1]], max_tokens=1))
        number += 1
        num_left_out += counts(scheduling.step())[0] > 1
    assert 9 <= num_left_out <= 9 + 290 / 50


def test_the_ration_is_spent_and_comes_back() -> None:
    ration = PrefillOnly()
    for _ in range(9):
        assert ration.may_go_on(100)
        ration.count(is_prefill_only=True)
    assert not ration.may_go_on(100)
    for _ in range(51):
        ration.count(is_prefill_only=False)
    assert ration.may_go_on(1)
    ration.count(is_prefill_only=True)
    assert not ration.may_go_on(1)
