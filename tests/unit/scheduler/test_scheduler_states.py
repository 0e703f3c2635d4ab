"""Workers whose layers keep a state of a sequence in its slot: no prefix is found again or shared, no position is
computed twice, and beams take their parents' states along."""

from dataclasses import replace

import numpy as np
import pytest
from scheduling import Scheduling, make_request

from contract.domain.beams import BeamSearch
from contract.domain.finish import FinishReason
from contract.domain.plan import StepResult
from contract.domain.pooling import Pooling, PoolingKind
from scheduler_svc.core.limits import WorkerLimits
from scheduler_svc.core.worker import StepError

LIMITS = WorkerLimits(60, 4, 6, 64, 32, has_state=True)
PROMPT = range(1, 11)


def test_no_prefix_is_found_again_where_layers_keep_a_state() -> None:
    for has_state in (False, True):
        run = Scheduling({"a": replace(LIMITS, has_state=has_state)})
        for number in (1, 2):
            run.add(make_request(number, PROMPT, max_tokens=9))
            run.run()
        run.assert_nothing_is_left()
        assert run.written[(2).to_bytes(16, "big"), 0].cached_tokens[0] == (0 if has_state else 8)
        assert bool(run.scheduler.workers["a"].blocks.num_cached) is not has_state


def test_samples_compute_their_prompts_themselves() -> None:
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
        copied += [each.state_slot for each in plan.admissions] if plan is not None else []
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
    assert all(each.state_slot is None for plan in plans if plan is not None for each in plan.admissions)
    assert np.any([plan is not None and len(plan.copy_sources) for plan in plans])
