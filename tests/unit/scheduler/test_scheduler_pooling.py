"""Requests whose prompts become vectors: they end when these are computed, and are never decoded."""

from dataclasses import replace

import numpy as np
from scheduling import make_request

from contract.domain.errors import ErrorCode
from contract.domain.finish import FinishReason
from contract.domain.plan import NO_TOKENS, StepPlan, StepResult
from contract.domain.pooling import Pooling, PoolingKind
from contract.domain.rows import TokenRows
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.limits import WorkerLimits
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import QueuedRequest

PROMPT = list(range(1, 12))
DIGEST = b"digest--"


def pooled(number: int, prompt: list[int] = PROMPT, kind: PoolingKind = PoolingKind.LAST) -> QueuedRequest:
    return replace(make_request(number, prompt, max_tokens=1), pooling=Pooling(kind))


def scheduler(*, capacity: int = 128, budget: int = 2**20, window: int = 2) -> Scheduler:
    made = Scheduler(SchedulerConfig(plans_in_flight=window))
    made.add_worker("w", WorkerLimits(capacity // 4, 4, 8, capacity, budget), DIGEST)
    return made


def plan_of(made: Scheduler) -> StepPlan:
    plan = made.schedule("w", 1)
    assert plan is not None
    return plan


def apply(made: Scheduler, plan: StepPlan, slots: list[int]) -> TokenRows:
    columns = np.array(slots, np.uint32), np.zeros(len(slots), np.uint32)
    rows = made.apply("w", StepResult(plan.step, *columns, NO_TOKENS), 0)
    made.check_integrity()
    return rows


def test_it_ends_with_a_row_without_tokens_that_names_the_model() -> None:
    made = scheduler()
    made.add(pooled(1), 0)
    plan = plan_of(made)
    assert plan.admissions[0].pooling == Pooling()
    assert made.schedule("w", 0) is None  # nothing is decoded, though there is room for a plan
    rows = apply(made, plan, [plan.admissions[0].slot])
    assert rows.counts.tolist() == [0]
    assert rows.finishes.tolist() == [FinishReason.POOLED]
    assert (rows.model_digest, list(rows.starts)) == (DIGEST, [0])
    assert not made.list_requests()
    assert made.stats().workers["w"].num_used_blocks == 0
    assert made.stats().counters.num_finished_requests == {"pooled": 1}


def test_a_chunk_ends_nothing() -> None:
    made = scheduler(budget=8, window=1)
    made.add(pooled(1), 0)
    first = plan_of(made)
    assert first.num_tokens.tolist() == [8]
    assert len(apply(made, first, [])) == 0
    second = plan_of(made)
    assert second.num_tokens.tolist() == [3]
    assert apply(made, second, second.slots.tolist()).finishes.tolist() == [FinishReason.POOLED]


def test_only_the_last_state_may_be_computed_after_a_prefix_that_is_found() -> None:
    made = scheduler(window=1)
    cached = []
    for number, kind in enumerate((PoolingKind.MEAN, PoolingKind.LAST, PoolingKind.MEAN, PoolingKind.CLS)):
        made.add(pooled(number, kind=kind), 0)
        plan = plan_of(made)
        cached.append(plan.admissions[0].num_computed_tokens)
        apply(made, plan, [plan.admissions[0].slot])
    assert cached == [0, 8, 0, 0]


def test_a_prompt_may_fill_the_context_and_no_more() -> None:
    made = scheduler(capacity=12)
    made.add(pooled(1, list(range(12))), 0)
    plan = plan_of(made)
    assert made.schedule("w", 0) is None
    assert apply(made, plan, [plan.admissions[0].slot]).finishes.tolist() == [FinishReason.POOLED]
    rows = made.add(pooled(2, list(range(13))), 0)
    assert rows.errors[0].code is ErrorCode.CONTEXT_LENGTH_EXCEEDED


def test_the_loss_of_its_worker_lets_it_begin_again_anywhere() -> None:
    made = scheduler()
    made.add(pooled(1, kind=PoolingKind.MEAN), 0)
    plan_of(made)
    made.remove_worker("w")
    made.check_integrity()
    made.add_worker("w", WorkerLimits(32, 4, 8, 128), b"another-")
    plan = plan_of(made)
    assert (plan.admissions[0].num_computed_tokens, plan.num_tokens.tolist()) == (0, [11])
    rows = apply(made, plan, [plan.admissions[0].slot])
    assert (rows.finishes.tolist(), rows.model_digest) == ([FinishReason.POOLED], b"another-")
