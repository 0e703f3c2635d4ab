"""Which tokens of which sequences a plan computes, and which blocks they get."""

import numpy as np
import pytest
from scheduling import EOS, Scheduling, make_request, request_id

from contract.domain.errors import ErrorCode
from contract.domain.finish import CancelReason, FinishReason
from contract.domain.plan import Logprobs, StepPlan, StepResult
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.limits import WorkerLimits
from scheduler_svc.core.scheduler import Scheduler


def limits(num_blocks: int = 64, block_size: int = 4, max_num_seqs: int = 8, max_model_len: int = 128) -> WorkerLimits:
    return WorkerLimits(num_blocks, block_size, max_num_seqs, max_model_len)


def advances(plan: StepPlan | None) -> dict[int, int]:
    assert plan is not None
    return dict(zip(plan.slots.tolist(), plan.num_tokens.tolist(), strict=True))


def prompt(length: int, start: int = 0) -> list[int]:
    return [(start + position) % 11 for position in range(length)]


def test_a_long_prompt_is_computed_in_chunks_beside_decoding_sequences() -> None:
    mixed = {"max_prefill_only_steps": 0}
    scheduling = Scheduling({"a": limits()}, max_num_batched_tokens=8, plans_in_flight=1, **mixed)
    scheduling.add(make_request(1, prompt(3), max_tokens=20))
    assert advances(scheduling.step()) == {0: 3}
    scheduling.add(make_request(2, prompt(18, 5), max_tokens=20))
    assert advances(scheduling.step()) == {0: 1, 1: 7}
    assert advances(scheduling.step()) == {0: 1, 1: 7}
    assert scheduling.output(2) == []
    assert advances(scheduling.step()) == {0: 1, 1: 4}
    assert len(scheduling.output(2)) == 1
    scheduling.run()
    scheduling.assert_nothing_is_left()


def test_a_chunk_may_leave_one_token_behind() -> None:
    scheduling = Scheduling({"a": limits()}, max_num_batched_tokens=8, plans_in_flight=3)
    scheduling.add(make_request(1, prompt(9), n=2, max_tokens=5))
    assert [advances(scheduling.schedule()) for _ in range(3)] == [{0: 8}, {0: 1}, {0: 1, 1: 1}]
    scheduling.run()
    scheduling.assert_nothing_is_left()


def test_decodes_come_first_then_begun_prompts_then_new_ones() -> None:
    mixed = {"max_prefill_only_steps": 0}
    scheduling = Scheduling({"a": limits()}, max_num_batched_tokens=6, plans_in_flight=1, **mixed)
    scheduling.add(make_request(1, prompt(2), max_tokens=20))
    scheduling.step()
    scheduling.add(make_request(2, prompt(8), max_tokens=20))
    scheduling.add(make_request(3, prompt(4, 7), max_tokens=20))
    assert advances(scheduling.step()) == {0: 1, 1: 5}
    assert advances(scheduling.step()) == {0: 1, 1: 3, 2: 2}


@pytest.mark.parametrize(("step_ns", "num_in_flight"), [(0, 2), (700_000, 3), (1_400_000, 3), (1_600_000, 2)])
def test_short_steps_have_one_more_plan_in_flight(step_ns: int, num_in_flight: int) -> None:
    scheduler = Scheduler(SchedulerConfig(plans_in_flight=2, short_step_us=1500))
    scheduler.add_worker("a", limits())
    scheduler.add(make_request(1, prompt(3), max_tokens=40), 0)
    plan = scheduler.schedule("a", 0)
    assert plan is not None
    assert scheduler.schedule("a", 0) is not None
    scheduler.apply("a", StepResult(1, plan.slots, np.ones(1, np.uint32), np.array([5], np.uint32), step_ns=step_ns), 0)
    while scheduler.schedule("a", 0) is not None:
        pass
    assert len(scheduler.workers["a"].in_flight) == num_in_flight


def test_a_nearly_full_worker_begins_prompts_in_some_plans_only() -> None:
    scheduling = Scheduling({"a": limits(num_blocks=256, max_num_seqs=32)}, plans_in_flight=1, admit_every=3)
    for number in range(31):
        scheduling.add(make_request(number, prompt(2), max_tokens=40))
    assert len(advances(scheduling.step())) == 31
    scheduling.add(make_request(31, prompt(5), max_tokens=40))
    # One slot of 32 is free: two plans only decode.
    assert [len(advances(scheduling.step())) for _ in range(2)] == [31, 31]
    assert advances(scheduling.step())[31] == 5
    for _ in range(4):
        scheduling.step()
    scheduling.cancel(3)
    scheduling.add(make_request(32, prompt(6, 7), max_tokens=40))
    # The last prompt was long ago.
    assert advances(scheduling.step())[3] == 6


def test_a_worker_with_many_free_slots_begins_prompts_at_once() -> None:
    scheduling = Scheduling({"a": limits(num_blocks=256, max_num_seqs=32)}, plans_in_flight=1, admit_every=3)
    for number in range(29):
        scheduling.add(make_request(number, prompt(2), max_tokens=40))
    scheduling.step()
    scheduling.add(make_request(29, prompt(5), max_tokens=40))
    assert advances(scheduling.step())[29] == 5


def test_no_more_sequences_run_than_the_budget_has_tokens() -> None:
    scheduling = Scheduling({"a": limits()}, max_num_batched_tokens=3, plans_in_flight=1)
    for number in range(1, 6):
        scheduling.add(make_request(number, [number], max_tokens=4))
    assert advances(scheduling.step()) == {0: 1, 1: 1, 2: 1}
    assert advances(scheduling.step()) == {0: 1, 1: 1, 2: 1}
    scheduling.run()
    scheduling.assert_nothing_is_left()


def test_a_worker_can_lower_the_budget() -> None:
    small = WorkerLimits(64, 4, 8, 128, max_num_batched_tokens=5)
    scheduling = Scheduling({"a": small}, max_num_batched_tokens=100, plans_in_flight=1)
    scheduling.add(make_request(1, prompt(12), max_tokens=2))
    assert advances(scheduling.step()) == {0: 5}


@pytest.mark.parametrize("window", [1, 2, 4])
def test_the_window_bounds_the_plans_in_flight(window: int) -> None:
    scheduling = Scheduling({"a": limits()}, plans_in_flight=window)
    scheduling.add(make_request(1, prompt(3), max_tokens=50))
    plans = [scheduling.schedule() for _ in range(window + 1)]
    assert [plan.step for plan in plans if plan] == list(range(1, window + 1))
    assert plans[-1] is None
    scheduling.complete()
    assert scheduling.schedule() is not None


def test_nothing_is_planned_beyond_max_tokens() -> None:
    scheduling = Scheduling({"a": limits()}, plans_in_flight=4)
    scheduling.add(make_request(1, prompt(3), max_tokens=2))
    assert advances(scheduling.schedule()) == {0: 3}
    assert advances(scheduling.schedule()) == {0: 1}
    assert scheduling.schedule() is None
    scheduling.run()
    assert (len(scheduling.output(1)), scheduling.finish(1)) == (2, FinishReason.LENGTH)
    assert scheduling.scheduler.stats().counters.num_discarded_tokens == 0


def test_a_full_context_ends_a_sequence_without_max_tokens() -> None:
    scheduling = Scheduling({"a": limits(max_model_len=10)}, plans_in_flight=4)
    scheduling.add(make_request(1, prompt(3)))
    scheduling.run()
    assert (len(scheduling.output(1)), scheduling.finish(1)) == (7, FinishReason.LENGTH)


def test_a_worker_with_few_blocks_bounds_the_context() -> None:
    scheduling = Scheduling({"a": limits(num_blocks=3)}, plans_in_flight=2)
    scheduling.add(make_request(1, prompt(5)))
    scheduling.run()
    assert (len(scheduling.output(1)), scheduling.finish(1)) == (7, FinishReason.LENGTH)


@pytest.mark.parametrize("window", [1, 2, 3, 4])
def test_a_sequence_that_ends_by_eos_wastes_at_most_the_rest_of_the_window(window: int) -> None:
    wasted = []
    for number in range(1, 40):
        scheduling = Scheduling({"a": limits()}, plans_in_flight=window)
        scheduling.add(make_request(number, [1, 2], max_tokens=100, eos_token_ids=(EOS,)))
        scheduling.run()
        assert scheduling.finish(number) == FinishReason.STOP
        assert scheduling.output(number)[-1] == EOS
        wasted.append(scheduling.scheduler.stats().counters.num_discarded_tokens)
        scheduling.assert_nothing_is_left()
    assert max(wasted) == window - 1


def test_late_results_of_a_slot_do_not_reach_its_next_occupant() -> None:
    scheduling = Scheduling({"a": limits(max_num_seqs=1)}, plans_in_flight=3)
    scheduling.add(make_request(1, [1, 2], max_tokens=50))
    scheduling.add(make_request(2, [3, 4], max_tokens=5))
    for _ in range(3):
        scheduling.schedule()
    scheduling.cancel(1)
    scheduling.complete()
    plan = scheduling.schedule()
    assert plan is not None
    assert plan.released_slots.tolist() == [0]
    assert [admission.slot for admission in plan.admissions] == [0]
    assert scheduling.output(1) == scheduling.output(2) == []
    scheduling.run()
    assert scheduling.output(2) == scheduling.expected(scheduling.requests[request_id(2)], 0)[0]


def test_stop_ids_end_a_sequence_with_the_stop_token_in_its_row() -> None:
    scheduling = Scheduling({"a": limits()})
    scheduling.add(make_request(1, [1], max_tokens=100, stop_token_ids=(4, 7), eos_token_ids=(EOS,)))
    scheduling.run()
    assert scheduling.finish(1) == FinishReason.STOP
    assert scheduling.output(1)[-1] in (4, 7, EOS)
    scheduling.assert_nothing_is_left()


def test_ignored_eos_does_not_end_a_sequence_but_stop_ids_do() -> None:
    request = make_request(1, [1], max_tokens=60, eos_token_ids=(EOS,))
    ignoring = make_request(2, [1], max_tokens=60, eos_token_ids=(EOS,))
    object.__setattr__(ignoring.stopping, "ignore_eos", True)
    scheduling = Scheduling({"a": limits()})
    scheduling.add(request)
    scheduling.add(ignoring)
    plan = scheduling.schedule()
    assert plan is not None
    assert [admission.stop_token_ids for admission in plan.admissions] == [(EOS,), ()]
    scheduling.run()
    assert (scheduling.finish(1), scheduling.finish(2)) == (FinishReason.STOP, FinishReason.LENGTH)
    assert EOS in scheduling.output(2)


def test_min_tokens_is_told_to_the_worker_and_respected_here() -> None:
    scheduling = Scheduling({"a": limits()}, plans_in_flight=1)
    scheduling.add(make_request(1, [1], max_tokens=30, min_tokens=9, stop_token_ids=(1, 2, 3), eos_token_ids=(EOS,)))
    plan = scheduling.schedule()
    assert plan is not None
    assert plan.admissions[0].min_output_tokens == 9
    assert plan.admissions[0].stop_token_ids == (EOS, 1, 2, 3)
    scheduling.run()
    assert len(scheduling.output(1)) > 9
    assert scheduling.finish(1) == FinishReason.STOP


def test_a_step_without_tokens_is_made_up_for() -> None:
    scheduling = Scheduling({"a": limits()}, plans_in_flight=3)
    scheduling.add(make_request(1, prompt(5), max_tokens=6))
    for _ in range(3):
        scheduling.schedule()
    scheduling.complete(silent=(0,))
    scheduling.complete(silent=(0,))
    assert scheduling.output(1) == []
    scheduling.run()
    scheduling.assert_nothing_is_left()


def test_a_request_that_needs_nothing_is_ended_at_once() -> None:
    scheduling = Scheduling({"a": limits(max_model_len=8)})
    scheduling.add(make_request(1, prompt(8)))
    error = scheduling.written[request_id(1), 0].error
    assert error is not None
    assert (error.code, error.param) == (ErrorCode.CONTEXT_LENGTH_EXCEEDED, "prompt")
    scheduling.add(make_request(2, []))
    error = scheduling.written[request_id(2), 0].error
    assert error is not None
    assert error.code == ErrorCode.INVALID_ARGUMENT
    assert not scheduling.scheduler.requests


def test_what_no_worker_can_hold_waits_for_the_first_worker_and_ends_then() -> None:
    scheduling = Scheduling({"a": limits(max_model_len=8)})
    scheduling.remove_worker("a")
    scheduling.add(make_request(1, prompt(9), n=2))
    assert scheduling.finish(1) == FinishReason.UNSPECIFIED
    scheduling.add_worker("a")
    assert scheduling.finish(1) == scheduling.finish(1, 1) == FinishReason.ERROR
    assert not scheduling.scheduler.requests


def test_a_request_that_comes_twice_is_served_once() -> None:
    scheduling = Scheduling({"a": limits()})
    request = make_request(1, [1, 2], max_tokens=3)
    scheduling.add(request)
    scheduling.step()
    scheduling.add(request)
    scheduling.run()
    scheduling.assert_nothing_is_left()


def test_has_room_follows_what_waits() -> None:
    scheduling = Scheduling({"a": limits(max_num_seqs=1)}, max_waiting_seqs=2)
    scheduling.add(make_request(1, [1], max_tokens=9))
    assert scheduling.scheduler.has_room()
    scheduling.add(make_request(2, [1], max_tokens=9))
    assert not scheduling.scheduler.has_room()
    scheduling.step()
    assert scheduling.scheduler.has_room()


@pytest.mark.parametrize(
    "fields",
    [{"scheduling_policy": "lottery"}, {"plans_in_flight": 0}, {"max_num_batched_tokens": 0}, {"max_waiting_seqs": 0}],
)
def test_a_malformed_configuration_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        SchedulerConfig(**fields)  # type: ignore[arg-type]


def test_stats_count_what_happened() -> None:
    scheduling = Scheduling({"a": limits()}, plans_in_flight=2)
    scheduling.add(make_request(1, prompt(9), max_tokens=4))
    scheduling.add(make_request(2, prompt(9), max_tokens=40))
    scheduling.schedule()
    scheduling.schedule()
    stats = scheduling.scheduler.stats()
    worker = stats.workers["a"]
    assert (stats.num_running_seqs, stats.num_waiting_seqs, stats.num_requests) == (2, 0, 2)
    assert (worker.num_plans_in_flight, worker.batch_num_seqs, worker.batch_num_tokens) == (2, 2, 2)
    assert (worker.num_used_blocks, worker.num_free_blocks) == (6, 58)
    for _ in range(6):
        scheduling.step()
    scheduling.cancel(2)
    counters = scheduling.scheduler.stats().counters
    assert counters.num_finished_requests == {"length": 1, "cancelled": 1}
    assert counters.num_prompt_tokens == 18
    assert counters.num_generated_tokens == 4 + len(scheduling.output(2))


def test_block_tables_and_requests_can_be_looked_at() -> None:
    scheduling = Scheduling({"a": limits()}, plans_in_flight=1)
    scheduling.add(make_request(1, prompt(6), max_tokens=9, tenant="t", priority=3))
    scheduling.add(make_request(2, prompt(2), n=2, max_tokens=9))
    scheduling.step()
    (table,) = scheduling.scheduler.block_table(request_id(1)) or ()
    assert (table.worker_id, table.slot, table.num_tokens, table.num_computed_tokens) == ("a", 0, 7, 6)
    assert list(table.block_ids) == [*scheduling.paged["a"].slots[0].tables[0].values()]
    assert scheduling.scheduler.block_table(request_id(9)) is None
    first, second = scheduling.scheduler.list_requests()
    assert (first.tenant, first.priority, first.num_prompt_tokens) == ("t", 3, 6)
    assert [sequence.status for sequence in second.sequences] == ["running", "waiting"]


def test_rows_carry_logprobs_of_the_tokens_that_count() -> None:
    scheduling = Scheduling({"a": limits()}, plans_in_flight=2)
    scheduler = scheduling.scheduler
    for number in (1, 2, 3):
        scheduler.add(make_request(number, [1], max_tokens=9), 0)
    scheduler.schedule("a", 0)
    scheduler.cancel(request_id(2), CancelReason.CLIENT, 0)
    logprobs = Logprobs(
        sampled=np.array([-1, -2, -3], np.float32),
        ranks=np.array([1, 2, 3], np.uint32),
        top_counts=np.array([1, 2, 0], np.uint32),
        top_ids=np.array([10, 20, 21], np.uint32),
        top_logprobs=np.array([-0.1, -0.2, -0.3], np.float32),
    )
    columns = (np.array([0, 1, 2], np.uint32), np.ones(3, np.uint32), np.array([5, 6, 7], np.uint32))
    rows = scheduler.apply("a", StepResult(1, *columns, logprobs=logprobs), 0)
    assert rows.token_ids.tolist() == [5, 7]
    assert rows.logprobs is not None
    assert rows.logprobs.sampled.tolist() == [-1, -3]
    assert rows.logprobs.ranks.tolist() == [1, 3]
    assert rows.logprobs.top_counts.tolist() == [1, 0]
    assert rows.logprobs.top_ids.tolist() == [10]
    assert scheduler.stats().counters.num_discarded_tokens == 1
