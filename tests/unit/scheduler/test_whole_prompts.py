"""Workers with an encoder: prompts are computed whole, in one step each, without blocks; nothing is generated."""

from dataclasses import replace

import numpy as np
import pytest
from scheduling import Scheduling, make_request

from contract.domain.errors import ErrorCode
from contract.domain.finish import FinishReason
from contract.domain.model_kind import ModelKind
from contract.domain.pooling import SCORED, VECTOR_KINDS, Pooling, PoolingKind
from scheduler_svc.core.limits import WorkerLimits
from scheduler_svc.core.sequence import QueuedRequest

ENCODER = WorkerLimits(0, 16, 8, 30, 20, model_kind=ModelKind.ENCODER)


def pooled(number: int, length: int, kind: PoolingKind = PoolingKind.LAST) -> QueuedRequest:
    return make_request(number, [7] * length, max_tokens=1, pooling=Pooling(kind))


def test_prompts_are_admitted_whole_as_far_as_a_step_has_tokens() -> None:
    scheduling = Scheduling({"a": ENCODER}, plans_in_flight=1)
    for number, length in enumerate((9, 9, 5, 1), 1):
        scheduling.add(pooled(number, length))
    first = scheduling.schedule()
    assert first is not None
    assert first.num_tokens.tolist() == [9, 9]  # the third does not fit, and the fourth does not overtake it
    assert not any(len(each.block_ids) for each in first.admissions)
    scheduling.complete()
    second = scheduling.schedule()
    assert second is not None
    assert (second.num_tokens.tolist(), sorted(second.released_slots.tolist())) == ([5, 1], [0, 1])
    scheduling.complete()
    assert {scheduling.finish(number) for number in range(1, 5)} == {FinishReason.POOLED}
    scheduling.assert_nothing_is_left()


def test_a_prompt_beyond_a_step_or_a_context_is_told_the_bound() -> None:
    scheduling = Scheduling({"a": ENCODER})
    scheduling.add(pooled(1, 20))
    scheduling.add(pooled(2, 21))
    error = scheduling.written[(2).to_bytes(16, "big"), 0].error
    assert error is not None
    assert (error.code, "is 20 tokens; the prompt has 21" in error.message) == (ErrorCode.CONTEXT_LENGTH_EXCEEDED, True)
    scheduling.run()
    assert scheduling.finish(1) is FinishReason.POOLED
    assert replace(ENCODER, max_model_len=12).capacity == 12


def test_the_scheduler_s_own_budget_bounds_prompts_too() -> None:
    scheduling = Scheduling({"a": ENCODER}, max_num_batched_tokens=8)
    scheduling.add(pooled(1, 8))
    scheduling.add(pooled(2, 9))
    scheduling.run()
    assert (scheduling.finish(1), scheduling.finish(2)) == (FinishReason.POOLED, FinishReason.ERROR)


def test_nothing_is_generated_and_the_error_says_why() -> None:
    scheduling = Scheduling({"a": ENCODER})
    scheduling.add(make_request(1, [1, 2], max_tokens=4))
    error = scheduling.written[(1).to_bytes(16, "big"), 0].error
    assert error is not None
    assert (error.code, error.param) == (ErrorCode.INVALID_ARGUMENT, "model")
    assert "encoder" in error.message


@pytest.mark.parametrize("kind", VECTOR_KINDS)
def test_no_prefix_is_found(kind: PoolingKind) -> None:
    scheduling = Scheduling({"a": ENCODER, "b": ENCODER}, plans_in_flight=1)
    for number in (1, 2):
        scheduling.add(pooled(number, 17, kind))
        plan = scheduling.step("a")
        assert plan is not None
        assert (plan.num_tokens.tolist(), plan.admissions[0].num_computed_tokens) == ([17], 0)


def test_while_it_replaces_a_decoder_requests_that_generate_go_on_there() -> None:
    decoder = WorkerLimits(24, 4, 6, 60)
    scheduling = Scheduling({"a": ENCODER, "b": decoder})
    scheduling.remove_worker("a")
    scheduling.add_worker("a", b"encoder")
    scheduling.add(make_request(1, [1, 2], max_tokens=4))
    assert scheduling.schedule("a") is None
    scheduling.run()
    assert scheduling.finish(1) is FinishReason.LENGTH
    assert np.unique(scheduling.output(1)).size


def test_the_loss_of_a_worker_lets_its_prompts_begin_again() -> None:
    scheduling = Scheduling({"a": ENCODER})
    scheduling.add(pooled(1, 13))
    scheduling.schedule()
    assert scheduling.lose_worker("a") == [1]
    scheduling.add_worker("a")
    scheduling.run()
    assert scheduling.finish(1) is FinishReason.POOLED
    scheduling.assert_nothing_is_left()


def test_a_cross_encoder_takes_scored_pairs_alone_and_no_other_model_does() -> None:
    cross = replace(ENCODER, model_kind=ModelKind.CROSS_ENCODER)
    pair = make_request(2, [7] * 5, max_tokens=1, pooling=SCORED, num_first_tokens=3)
    for limits, request in ((cross, pooled(1, 5)), (ENCODER, pair), (WorkerLimits(24, 4, 6, 60), pair)):
        scheduling = Scheduling({"a": limits})
        scheduling.add(request)
        error = scheduling.written[request.request_id, 0].error
        assert error is not None
        assert (error.code, error.param) == (ErrorCode.INVALID_ARGUMENT, "model")
    scheduling = Scheduling({"a": cross})
    scheduling.add(pair)
    plan = scheduling.step()
    assert plan is not None
    assert (plan.admissions[0].num_first_tokens, plan.admissions[0].pooling) == (3, SCORED)
    assert scheduling.finish(2) is FinishReason.POOLED
