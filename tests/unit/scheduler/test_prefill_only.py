"""In a burst of prompts a few steps leave out what decodes."""

import random
from dataclasses import replace

import pytest
from paged_worker import VOCAB
from scheduling import EOS, Scheduling, make_request, request_id

from contract.domain.beams import BeamSearch
from contract.domain.kv_kinds import SEES_ALL, KVKind, Reach
from contract.domain.plan import StepPlan
from scheduler_svc.core.limits import WorkerLimits
from scheduler_svc.core.plan_draft import PlanDraft
from scheduler_svc.core.policy import WaitingQueue
from scheduler_svc.core.prefill_only import PrefillOnly
from scheduler_svc.core.prefilling import Prefilling
from scheduler_svc.core.sequence import QueuedRequest
from scheduler_svc.core.worker import I64, WorkerState

KINDS = (
    ((1, SEES_ALL),),
    ((1, Reach(5)),),
    ((1, Reach(chunk=4)),),
    ((2, SEES_ALL), (1, Reach(3))),
    ((1, Reach(2)), (2, Reach(7))),
)


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


def flood(number: int) -> list[int]:
    """A prompt of nine tokens that begins like no other."""
    return [int(digit) for digit in f"{number:09}"[::-1]]


def test_prompts_without_end_make_fewer_than_one_gap_in_a_hundred_longer() -> None:
    scheduling = decoding()
    left_out = []
    for number in range(3, 603, 2):
        for each in (number, number + 1):
            scheduling.add(make_request(each, flood(each), max_tokens=1))
        left_out.append(counts(scheduling.step())[0] > 1)
    assert sum(left_out[:20]) == 9  # that had been saved
    assert sum(left_out[20:]) == 2
    assert scheduling.scheduler.stats().counters.num_prefill_only_steps == 11


def test_what_decodes_stays_in_a_step_that_has_no_use_for_its_tokens() -> None:
    scheduling = decoding(max_num_seqs=3)
    for number in range(3, 9):
        scheduling.add(make_request(number, flood(number)[:8], max_tokens=20))
    # The last slot's prompt fills what is left, and no other finds a slot.
    assert counts(scheduling.step()) == [1, 1, 8]


def test_prompts_that_no_slot_takes_do_not_count_as_waiting() -> None:
    scheduling = decoding(max_num_seqs=3)
    scheduling.add(make_request(3, flood(3) + [1] * 3, max_tokens=20))
    scheduling.add(make_request(4, [5] * 60, max_tokens=20))
    assert counts(scheduling.step()) == [1, 1, 8]


def test_what_decodes_stays_where_the_prompts_that_wait_find_no_blocks() -> None:
    scheduling = Scheduling(
        {"a": WorkerLimits(num_blocks=5, block_size=4, max_num_seqs=16, max_model_len=20)},
        max_num_batched_tokens=10,
        plans_in_flight=1,
    )
    for number in (1, 2):
        scheduling.add(make_request(number, [number, 3], max_tokens=2))
    scheduling.step()
    for number in (3, 4):
        scheduling.add(make_request(number, flood(number)[:8], max_tokens=2))
    assert counts(scheduling.step()) == [1, 1, 8]
    assert scheduling.scheduler.stats().counters.num_prefill_only_steps == 0
    scheduling.run()
    scheduling.assert_nothing_is_left()


def test_one_sequence_among_many_tokens_is_not_left_out() -> None:
    scheduling = Scheduling(
        {"a": WorkerLimits(num_blocks=256, block_size=4, max_num_seqs=16, max_model_len=400)},
        max_num_batched_tokens=100,
        plans_in_flight=1,
    )
    scheduling.add(make_request(1, [1, 3], max_tokens=300))
    scheduling.step()
    scheduling.add(make_request(2, [5] * 390, max_tokens=4))
    assert counts(scheduling.step()) == [1, 99]


@pytest.mark.parametrize(("priority", "counted"), [(0, [1, 1, 8]), (1, [10]), (2, [10])])
def test_what_decodes_does_not_wait_for_prompts_that_are_less_urgent(priority: int, counted: list[int]) -> None:
    scheduling = Scheduling(
        {"a": WorkerLimits(num_blocks=256, block_size=4, max_num_seqs=16, max_model_len=400)},
        max_num_batched_tokens=10,
        plans_in_flight=1,
        scheduling_policy="priority",
    )
    for number in (1, 2):
        scheduling.add(make_request(number, [number, 3], max_tokens=300, priority=priority + number - 1))
    scheduling.step()
    scheduling.add(make_request(3, [5] * 60, max_tokens=20, priority=1))
    assert counts(scheduling.step()) == counted


def test_a_prompt_that_another_worker_has_is_deferred_once_a_plan() -> None:
    limits = WorkerLimits(num_blocks=256, block_size=4, max_num_seqs=16, max_model_len=400)
    scheduling = Scheduling({"a": limits, "b": limits}, max_num_batched_tokens=10, plans_in_flight=1)
    scheduling.add(make_request(1, [9] * 8, max_tokens=300))
    scheduling.step("b")
    scheduling.add(make_request(2, [7, 3], max_tokens=300))
    scheduling.step("a")
    scheduling.add(make_request(3, [9] * 8, max_tokens=300))
    scheduling.add(make_request(4, [5] * 60, max_tokens=20))
    assert counts(scheduling.step("a")) == [10]
    assert scheduling.scheduler.requests[request_id(3)].sequences[0].num_deferrals == 1


def test_the_ration_is_spent_and_comes_back() -> None:
    ration = PrefillOnly()
    for _ in range(9):
        assert ration.may_go_on(100)
        ration.count(is_prefill_only=True)
    assert not ration.may_go_on(100)
    for _ in range(129):
        ration.count(is_prefill_only=False)
    assert ration.may_go_on(1)
    ration.count(is_prefill_only=True)
    assert not ration.may_go_on(1)


@pytest.mark.parametrize("seed", range(4))
def test_any_step_may_leave_out_what_decodes(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    dice = random.Random(seed)
    num_left_out = 0

    def leave_out(
        prefilling: Prefilling, worker: WorkerState, waiting: WaitingQueue, draft: PlanDraft, decoding: I64
    ) -> bool:
        nonlocal num_left_out
        does = len(decoding) > 0 and bool(draft.chunks) and dice.random() < 0.6
        num_left_out += does
        return does

    monkeypatch.setattr(Prefilling, "_is_burst", leave_out)
    for _ in range(8):
        do_anything(drawn_scheduling(dice), dice)
    assert num_left_out > 50


def do_anything(scheduling: Scheduling, dice: random.Random) -> None:
    number = 0
    for _ in range(250):
        worker_id = dice.choice(list(scheduling.limits))
        match dice.choices(("add", "schedule", "complete", "cancel", "lose"), (4, 10, 9, 0.7, 0.2))[0]:
            case "add" if len(scheduling.scheduler.requests) < 25:
                number += 1
                scheduling.add(drawn_request(dice, number))
            case "schedule":
                scheduling.schedule(worker_id)
            case "complete":
                scheduling.complete(worker_id)
            case "cancel" if number:
                scheduling.cancel(dice.randrange(max(1, number - 20), number + 1))
            case "lose":
                scheduling.lose_worker(worker_id)
                scheduling.add_worker(worker_id)
    scheduling.run()
    scheduling.assert_nothing_is_left()


def drawn_scheduling(dice: random.Random) -> Scheduling:
    """One to three workers of one capacity, with layers of any kinds."""
    window, block_size = dice.randint(1, 4), dice.randint(1, 4)
    limits = {}
    for worker_id in "abc"[: dice.randint(1, 3)]:
        kinds = dice.choice(KINDS)
        limits[worker_id] = WorkerLimits(
            dice.randint(6, 30) * len(kinds),
            block_size,
            dice.randint(2, 8),
            max_model_len=40,
            kinds=tuple(KVKind(block_size * factor, reach) for factor, reach in kinds),
            max_plans=window + 1,
            has_state=dice.random() < 0.25,
        )
    capacity = min(each.capacity for each in limits.values())
    return Scheduling(
        {worker_id: replace(each, max_model_len=capacity) for worker_id, each in limits.items()},
        plans_in_flight=window,
        max_num_batched_tokens=dice.randint(2, 10),
        enable_prefix_caching=dice.random() < 0.6,
        scheduling_policy=dice.choice(("fcfs", "priority", "fair")),
        admit_every=dice.randint(1, 3),
    )


def drawn_request(dice: random.Random, number: int) -> QueuedRequest:
    """One sample, several, or beams."""
    prompt = [1 + position % 3 for position in range(dice.randrange(20))]
    prompt += dice.choices(range(VOCAB), k=dice.randrange(1, 5))
    n = dice.choice((1, 1, 2, 3))
    return make_request(
        number,
        prompt,
        n=n,
        max_tokens=dice.randrange(1, 15),
        eos_token_ids=(EOS,) if dice.random() < 0.5 else (),
        priority=dice.randrange(3),
        tenant=dice.choice(("", "a", "b")),
        beams=BeamSearch() if dice.random() < 0.2 else None,
    )
