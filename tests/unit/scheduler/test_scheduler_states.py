"""Workers whose layers keep a state of a sequence in its slot: a prefix is found again where its state was saved, no
position is computed twice, and beams take their parents' states along."""

from dataclasses import replace

import numpy as np
import pytest
from scheduling import Scheduling, make_request

from contract.domain.beams import BeamSearch
from contract.domain.finish import FinishReason
from contract.domain.kv_kinds import KVKind, Reach
from contract.domain.params import Sampling
from contract.domain.plan import StepResult
from contract.domain.pooling import Pooling, PoolingKind
from scheduler_svc.core.blocks import hash_of_kind
from scheduler_svc.core.limits import WorkerLimits
from scheduler_svc.core.reuse import reusable
from scheduler_svc.core.sequence import ScheduledRequest
from scheduler_svc.core.worker import StepError, WorkerState

LIMITS = WorkerLimits(60, 4, 6, 64, 32, has_state=True)
SAVING = replace(LIMITS, num_saved_states=3)
PROMPT = range(1, 11)


def cached_tokens(run: Scheduling, number: int) -> int:
    return run.written[number.to_bytes(16, "big"), 0].cached_tokens[0]


@pytest.mark.parametrize(("limits", "found"), [(replace(LIMITS, has_state=False), 8), (LIMITS, 0), (SAVING, 8)])
def test_a_prefix_is_found_again_where_layers_keep_no_state_or_save_it(limits: WorkerLimits, found: int) -> None:
    run = Scheduling({"a": limits}, min_saved_tokens=4)
    for number in (1, 2):
        run.add(make_request(number, PROMPT, max_tokens=9))
        run.run()
    run.assert_nothing_is_left()
    assert cached_tokens(run, 2) == found
    assert bool(run.scheduler.workers["a"].blocks.num_cached) is bool(found)


def test_without_a_prefix_cache_no_state_is_saved() -> None:
    run = Scheduling({"a": SAVING}, enable_prefix_caching=False, min_saved_tokens=4)
    for number in (1, 2):
        run.add(make_request(number, PROMPT, max_tokens=9))
        run.run()
    assert (run.paged["a"].num_saved, cached_tokens(run, 2)) == (0, 0)


def test_a_state_is_saved_where_prompts_begin_to_differ_once_two_have() -> None:
    """The first has saved its own at its end."""
    run = Scheduling({"a": SAVING}, min_saved_tokens=4)
    prompts = [[*range(1, 9), *range(40 + 10 * number, 49 + 10 * number)] for number in range(3)]
    for number, prompt in enumerate(prompts):
        run.add(make_request(number, prompt, max_tokens=2))
        run.run()
    run.assert_nothing_is_left()
    assert [cached_tokens(run, number) for number in range(3)] == [0, 0, 8]


def test_a_state_that_saves_too_few_tokens_is_not_saved() -> None:
    run = Scheduling({"a": SAVING}, min_saved_tokens=9)
    for number in (1, 2):
        run.add(make_request(number, PROMPT, max_tokens=9))
        run.run()
    assert (run.paged["a"].num_saved, cached_tokens(run, 2)) == (0, 0)


def test_states_that_were_used_least_recently_are_forgotten() -> None:
    run = Scheduling({"a": SAVING}, min_saved_tokens=4)
    for number in (1, 2, 3, 1, 4, 1, 2):
        prompt = [number * 7 + place for place in range(9)]
        run.add(make_request(len(run.requests), prompt, max_tokens=2))
        run.run()
    run.assert_nothing_is_left()
    assert [cached_tokens(run, number) for number in range(7)] == [0, 0, 0, 8, 0, 8, 0]


def test_a_plan_saves_no_more_states_than_there_are() -> None:
    limits = replace(SAVING, num_saved_states=2, num_blocks=200, max_num_batched_tokens=200)
    run = Scheduling({"a": limits}, min_saved_tokens=4)
    for number in range(6):
        run.add(make_request(number, [number + 1, *PROMPT], max_tokens=3))
    plan = run.step()
    assert plan is not None
    assert sorted(plan.save_states.tolist()) == [6, 7]
    run.run()
    run.assert_nothing_is_left()


def test_a_prompt_does_not_stop_where_another_has_saved_its_state_meanwhile() -> None:
    run = Scheduling({"a": replace(SAVING, max_num_batched_tokens=20)}, min_saved_tokens=4)
    for number in (1, 2):
        run.add(make_request(number, range(1, 19), max_tokens=1))
    plans = [run.schedule() for _ in range(2)]
    assert [plan and plan.num_tokens.tolist() for plan in plans] == [[16, 4], [2, 14]]
    run.run()
    run.assert_nothing_is_left()
    assert run.paged["a"].num_saved == 1


def test_steps_with_prompts_only_are_not_for_what_no_step_may_have() -> None:
    """A prompt whose state is to be saved goes on in the next step."""
    limits = WorkerLimits(2000, 4, 50, 1200, 400, has_state=True, num_saved_states=3)
    run = Scheduling({"a": limits}, min_saved_tokens=4)
    shared = [place % 7 for place in range(364)]
    run.add(make_request(0, [*shared, 9, 9, 9, 9, 9], max_tokens=1))
    run.run()
    for number in range(1, 41):
        run.add(make_request(number, [number % 9], max_tokens=60))
    run.step()
    run.add(make_request(50, [*shared, *[8] * 700], max_tokens=2))
    plan = run.step()
    assert plan is not None
    assert plan.num_tokens.tolist() == [*[1] * 40, 360]


def test_what_is_found_is_not_forgotten_while_somebody_holds_it() -> None:
    """The second has computed the blocks of the first again, since there was no state; others take all that is free."""
    found = []
    for limits in (replace(LIMITS, has_state=False), replace(SAVING, num_saved_states=20)):
        run = Scheduling({"a": replace(limits, num_blocks=34)}, min_saved_tokens=4)
        shared = list(range(1, 25))
        run.add(make_request(1, [*shared, 7, 7, 7, 7, 7], max_tokens=1))
        run.run()
        run.add(make_request(2, [*shared, 8, 8, 8, 8, 8], max_tokens=30))
        run.step()
        for number in range(3, 6):
            for _ in range(3):
                run.step()
            run.add(make_request(number, [number] * 40, max_tokens=1))
        for _ in range(6):
            run.step()
        run.add(make_request(9, [*shared, 9, 9, 9, 9, 9], max_tokens=1))
        run.run()
        run.assert_nothing_is_left()
        found.append(cached_tokens(run, 9))
    assert found == [24, 24]


def test_tokens_are_those_that_would_have_been_whatever_the_budget_cuts() -> None:
    run = Scheduling({"a": replace(SAVING, max_num_batched_tokens=6)}, min_saved_tokens=4)
    for number in range(5):
        run.add(make_request(number, [*PROMPT, *([number] * number)], max_tokens=7))
    run.run()
    run.assert_nothing_is_left()
    assert run.paged["a"].num_saved


def test_beside_windows_a_prefix_is_found_where_its_state_was_saved() -> None:
    kinds = (KVKind(8), KVKind(4, Reach(5)))
    run = Scheduling({"a": replace(SAVING, kinds=kinds, num_blocks=120)}, min_saved_tokens=4)
    for number in range(4):
        run.add(make_request(number, [*range(1, 18), *([number] * number)], max_tokens=3))
        run.run()
    run.assert_nothing_is_left()
    assert [cached_tokens(run, number) for number in range(4)] == [0, 16, 16, 16]


def test_where_a_window_lacks_blocks_before_a_state_the_prefix_ends_at_an_earlier_one() -> None:
    kinds = (KVKind(8), KVKind(4, Reach(5)))
    worker = WorkerState("a", replace(SAVING, kinds=kinds), 32)
    sequence = ScheduledRequest(make_request(1, range(1, 30)), 0, 0).sequences[0]
    hashes = sequence.hashes(4)

    def keep(kind: int, block_hash: bytes) -> None:
        (block,) = worker.blocks.allocate(1)
        worker.blocks.register(block, hash_of_kind(block_hash, kind))
        worker.blocks.free([block])

    for index in (1, 3, 5):
        keep(0, hashes[index])
    for index in (0, 1, 2, 4, 5):  # of the tokens before the sixteenth the last four are gone
        keep(1, hashes[index])
    early, late = worker.states.save(hashes[1]), worker.states.save(hashes[3])
    found = reusable(worker, sequence, has_cache=True)
    assert (found.num_tokens, found.state, found.num_found) == (8, early, 24)
    keep(1, hashes[3])
    found = reusable(worker, sequence, has_cache=True)
    assert (found.num_tokens, found.state, found.num_found) == (16, late, 24)


def test_samples_begin_with_the_state_that_the_first_has_saved() -> None:
    run = Scheduling({"a": SAVING}, min_saved_tokens=4)
    run.add(make_request(1, PROMPT, n=3, max_tokens=5))
    run.run()
    run.assert_nothing_is_left()
    assert run.paged["a"].num_computed == len(PROMPT) + 2 * (len(PROMPT) - 8) + 3 * 4
    assert run.paged["a"].num_copies == 0


def test_a_preempted_sequence_goes_on_from_the_state_of_its_prompt() -> None:
    computed = []
    for limits in (LIMITS, SAVING):
        run = Scheduling({"a": replace(limits, num_blocks=8)}, min_saved_tokens=4)
        for number in (1, 2):
            run.add(make_request(number, [number, *PROMPT], max_tokens=12))
        run.run()
        run.assert_nothing_is_left()
        assert run.scheduler.stats().counters.num_preemptions > 0
        computed.append(run.paged["a"].num_computed)
    assert computed[1] < computed[0]


def test_a_prompt_whose_logprobs_are_asked_for_is_computed_whole_and_saves_its_state() -> None:
    run = Scheduling({"a": SAVING}, min_saved_tokens=4)
    for number in (1, 2, 3):
        sampling = Sampling(num_prompt_logprobs=0) if number < 3 else Sampling()
        run.add(replace(make_request(number, PROMPT, max_tokens=3), sampling=sampling))
        run.run()
    run.assert_nothing_is_left()
    assert [cached_tokens(run, number) for number in (1, 2, 3)] == [0, 0, 8]
    assert run.paged["a"].num_saved == 1


def test_beams_that_lost_their_slots_begin_with_a_saved_state() -> None:
    run = Scheduling({"a": replace(SAVING, num_blocks=14)}, min_saved_tokens=4)
    for number in (1, 2, 3):
        said = {"beams": BeamSearch(), "ignore_eos": True, "eos_token_ids": (0,)}
        run.add(make_request(number, [number, *PROMPT], n=2, max_tokens=12, **said))
    states = []
    while run.scheduler.requests:
        plan = run.step()
        states += [each.source_state for each in plan.admissions] if plan is not None else []
    run.assert_nothing_is_left()
    assert any(state is not None and state >= SAVING.max_num_seqs for state in states)


def test_the_paged_worker_notices_a_saved_state_of_other_tokens() -> None:
    run = Scheduling({"a": SAVING}, min_saved_tokens=4)
    run.add(make_request(1, PROMPT, max_tokens=3))
    run.run()
    (index,) = run.scheduler.workers["a"].states.hashes
    count, kv = run.paged["a"].states[index]
    run.paged["a"].states[index] = count, kv + 1
    run.add(make_request(2, PROMPT, max_tokens=3))
    with pytest.raises(AssertionError, match="a foreign or stale state"):
        run.run()


def test_samples_compute_their_prompts_themselves_where_no_state_is_saved() -> None:
    run = Scheduling({"a": LIMITS})
    run.add(make_request(1, PROMPT, n=3, max_tokens=5))
    run.run()
    run.assert_nothing_is_left()
    assert run.paged["a"].num_computed == 3 * (len(PROMPT) + 4)
    assert run.paged["a"].num_copies == 0


def test_a_preempted_sequence_is_computed_from_its_first_token() -> None:
    run = Scheduling({"a": replace(LIMITS, num_blocks=8)})
    for number in (1, 2, 3):
        run.add(make_request(number, PROMPT, max_tokens=12))
    run.run()
    run.assert_nothing_is_left()
    assert run.scheduler.stats().counters.num_preemptions > 0


def test_beams_go_on_from_the_states_of_their_parents() -> None:
    run = Scheduling({"a": LIMITS})
    request = make_request(1, PROMPT, n=3, beams=BeamSearch(), max_tokens=8, ignore_eos=True, eos_token_ids=(0,))
    run.add(request)
    copied = []
    for _ in range(30):
        plan = run.step()
        copied += [each.source_state for each in plan.admissions] if plan is not None else []
    run.assert_nothing_is_left()
    assert copied[0] is None  # the prompt
    assert len(copied) > 10
    assert None not in copied[1:]
    assert run.paged["a"].num_computed == len(PROMPT) + 7 * 3


def test_a_step_that_gives_a_slot_no_token_ends_the_epoch() -> None:
    run = Scheduling({"a": LIMITS})
    run.add(make_request(1, PROMPT, max_tokens=5))
    run.schedule()
    with pytest.raises(StepError, match="cannot be computed again"):
        run.complete(silent=(0,))
    assert len(run.scheduler.workers["a"].in_flight) == 1  # nothing has changed
    run.scheduler.check_integrity()


def test_a_prompt_that_is_pooled_gives_no_token_and_ends() -> None:
    run = Scheduling({"a": LIMITS})
    run.scheduler.add(make_request(1, PROMPT, pooling=Pooling(PoolingKind.LAST)), 0)
    run.scheduler.schedule("a", 0)
    result = StepResult(1, np.zeros(1, np.uint32), np.zeros(1, np.uint32), np.empty(0, np.uint32))
    assert run.scheduler.apply("a", result, 0).finishes.tolist() == [FinishReason.POOLED]


def test_the_paged_worker_notices_a_state_that_stands_for_other_tokens() -> None:
    run = Scheduling({"a": LIMITS})
    run.add(make_request(1, PROMPT, max_tokens=5))
    run.step()
    count, kv = run.paged["a"].states[0]
    run.paged["a"].states[0] = count + 1, kv
    with pytest.raises(AssertionError, match="a foreign or stale state"):
        run.run()


def test_without_states_no_slot_is_named() -> None:
    run = Scheduling({"a": replace(LIMITS, has_state=False)})
    run.add(make_request(1, PROMPT, n=2, beams=BeamSearch(), max_tokens=4))
    plans = [run.step() for _ in range(8)]
    assert all(each.source_state is None for plan in plans if plan is not None for each in plan.admissions)
    assert np.any([plan is not None and len(plan.copy_sources) for plan in plans])
