"""Whatever happens, the books balance and the outputs are those of undisturbed sequences."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from paged_worker import VOCAB
from scheduling import EOS, Scheduling, make_request

from contract.domain.finish import CancelReason
from contract.domain.kv_kinds import SEES_ALL, KVKind, Reach
from contract.domain.model_kind import ModelKind
from contract.domain.pooling import SCORED, Pooling, PoolingKind
from scheduler_svc.core.isolation import Tolerance
from scheduler_svc.core.limits import WorkerLimits

WORKERS = ("a", "b")
# Of the layers of a worker's model: how much larger than the smallest their blocks are, and how much they see.
KINDS = st.sampled_from(
    [
        ((1, SEES_ALL),),
        ((1, SEES_ALL),),
        ((1, Reach(5)),),
        ((1, Reach(chunk=4)),),
        ((2, SEES_ALL), (1, Reach(3))),
        ((1, SEES_ALL), (1, Reach(1))),
        ((3, SEES_ALL), (1, Reach(4))),
        ((2, SEES_ALL), (1, Reach(chunk=5))),
        ((1, Reach(2)), (2, Reach(7))),
    ]
)
MODELS = (b"", b"new")  # while one replaces the other
REASONS = (CancelReason.CLIENT, CancelReason.STOP, CancelReason.DEADLINE, CancelReason.SHUTDOWN)


class Machine(RuleBasedStateMachine):
    scheduling: Scheduling

    @initialize(
        window=st.integers(1, 4),
        budget=st.integers(1, 24),
        max_prefill_only_steps=st.integers(0, 3),
        caching=st.booleans(),
        policy=st.sampled_from(["fcfs", "priority", "fair"]),
        num_blocks=st.lists(st.integers(1, 12), min_size=2, max_size=2),
        block_size=st.lists(st.integers(1, 4), min_size=2, max_size=2),
        max_num_seqs=st.lists(st.integers(1, 5), min_size=2, max_size=2),
        forgiven_after=st.integers(1, 8),
        kinds=st.lists(KINDS, min_size=2, max_size=2),
        has_state=st.lists(st.sampled_from([False, False, True]), min_size=2, max_size=2),
        num_saved_states=st.lists(st.integers(0, 3), min_size=2, max_size=2),
        min_saved_tokens=st.integers(1, 6),
        model_kind=st.sampled_from([ModelKind.DECODER, *ModelKind]),
    )
    def start(  # noqa: PLR0917
        self,
        window,
        budget,
        max_prefill_only_steps,
        caching,
        policy,
        num_blocks,
        block_size,
        max_num_seqs,
        forgiven_after,
        kinds,
        has_state,
        num_saved_states,
        min_saved_tokens,
        model_kind,
    ):
        self.model_kind = model_kind
        is_encoder = model_kind.computes_whole_prompts
        limits = {
            worker_id: WorkerLimits(
                0 if is_encoder else num_blocks[i] * len(kinds[i]),
                block_size[i],
                max_num_seqs[i],
                max_model_len=30,
                max_num_batched_tokens=budget,
                kinds=tuple(KVKind(block_size[i] * factor, reach) for factor, reach in kinds[i]),
                max_plans=window + 1,
                has_state=has_state[i] and not is_encoder,
                num_saved_states=num_saved_states[i] if has_state[i] and not is_encoder else 0,
                model_kind=model_kind,
            )
            for i, worker_id in enumerate(WORKERS)
        }
        # One capacity, so that where a sequence ran does not decide how long it may get.
        capacity = min(limit.capacity for limit in limits.values())
        limits = {worker_id: replace(limit, max_model_len=capacity) for worker_id, limit in limits.items()}
        self.scheduling = Scheduling(
            limits,
            plans_in_flight=window,
            max_num_batched_tokens=budget,
            max_prefill_only_steps=max_prefill_only_steps,
            enable_prefix_caching=caching,
            min_saved_tokens=min_saved_tokens,
            scheduling_policy=policy,
            tolerance=Tolerance(num_tokens=forgiven_after),
        )
        self.num_requests = 0

    @rule(
        prefix=st.integers(0, 12),
        tail=st.lists(st.integers(0, VOCAB - 1), max_size=4),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        max_tokens=st.none() | st.integers(1, 12),
        min_tokens=st.integers(0, 3),
        stop_token_ids=st.lists(st.integers(1, VOCAB - 1), max_size=2).map(tuple),
        has_eos=st.booleans(),
        priority=st.integers(0, 2),
        patience=st.none() | st.integers(0, 30),
        salt=st.sampled_from(["", "", "salt"]),
        tenant=st.sampled_from(["", "a", "b"]),
        pooling=st.sampled_from([Pooling(PoolingKind.MEAN), Pooling()]),
        is_rare=st.integers(0, 7).map(lambda number: number == 7),
    )
    def add(  # noqa: PLR0917
        self,
        prefix,
        tail,
        n,
        max_tokens,
        min_tokens,
        stop_token_ids,
        has_eos,
        priority,
        patience,
        salt,
        tenant,
        pooling,
        is_rare,
    ):
        prompt = [1 + position % 3 for position in range(prefix)] + tail
        self.num_requests += 1
        # Of a decoder few prompts are pooled, of an encoder few are not.
        is_pooled = self.model_kind.computes_whole_prompts != is_rare
        pooling = SCORED if self.model_kind is ModelKind.CROSS_ENCODER else pooling
        self.scheduling.add(
            make_request(
                self.num_requests,
                prompt or [1],
                n=1 if is_pooled else n,
                pooling=pooling if is_pooled else None,
                max_tokens=1 if is_pooled else max_tokens,
                min_tokens=0 if is_pooled else min(min_tokens, max_tokens or min_tokens),
                stop_token_ids=stop_token_ids,
                eos_token_ids=(EOS,) if has_eos else (),
                priority=priority,
                deadline_ns=0 if patience is None else self.scheduling.now_ns + patience,
                cache_salt=salt,
                tenant=tenant,
            )
        )

    @rule(worker_id=st.sampled_from(WORKERS))
    def schedule(self, worker_id):
        if worker_id in self.scheduling.paged:
            self.scheduling.schedule(worker_id)

    @rule(worker_id=st.sampled_from(WORKERS), silent=st.sampled_from([(), (), (), (0,), (0, 1, 2, 3)]))
    def complete(self, worker_id, silent):
        if worker_id in self.scheduling.paged:
            has_state = self.scheduling.limits[worker_id].has_state
            self.scheduling.complete(worker_id, () if has_state else silent)

    @rule(worker_id=st.sampled_from(WORKERS), num_steps=st.integers(1, 6))
    def steps(self, worker_id, num_steps):
        for _ in range(num_steps if worker_id in self.scheduling.paged else 0):
            self.scheduling.step(worker_id)

    @rule(worker_id=st.sampled_from(WORKERS))
    def redeliver(self, worker_id):
        if worker_id in self.scheduling.paged:
            self.scheduling.redeliver(worker_id)

    @rule(
        back=st.integers(-1, 3),
        reason=st.sampled_from(REASONS),
        sequence=st.none() | st.integers(0, 2),
    )
    def cancel(self, back, reason, sequence):
        if self.num_requests - back > 0:  # one of the last, or the next to come
            self.scheduling.cancel(self.num_requests - back, reason, sequence)

    @rule(duration=st.integers(1, 10))
    def expire(self, duration):
        self.scheduling.expire(self.scheduling.now_ns + duration)

    @rule(worker_id=st.sampled_from(WORKERS), has_died=st.booleans(), model_digest=st.sampled_from(MODELS))
    def lose_or_find(self, worker_id, has_died, model_digest):
        if worker_id in self.scheduling.paged:
            (self.scheduling.lose_worker if has_died else self.scheduling.remove_worker)(worker_id)
        else:
            self.scheduling.add_worker(worker_id, model_digest)

    @rule(model_digest=st.sampled_from(MODELS))
    def replace_model(self, model_digest):
        if all(worker.model_digest != model_digest for worker in self.scheduling.paged.values()):
            self.scheduling.abandon(model_digest)

    def teardown(self):
        if not hasattr(self, "scheduling"):
            return
        for worker_id, model_digest in zip(WORKERS, MODELS, strict=True):
            if worker_id in self.scheduling.paged:
                self.scheduling.remove_worker(worker_id)
            self.scheduling.add_worker(worker_id, model_digest)
        self.scheduling.run()
        self.scheduling.assert_nothing_is_left()


TestAnyOrder = Machine.TestCase
TestAnyOrder.settings = settings(max_examples=100, stateful_step_count=50, suppress_health_check=[HealthCheck.too_slow])


PLAIN = {"a": WorkerLimits(24, 4, 6, 60), "b": WorkerLimits(40, 2, 4, 60)}
WINDOWED = {
    "a": WorkerLimits(26, 2, 6, 60, 16, kinds=(KVKind(6), KVKind(2, Reach(7)))),
    "b": WorkerLimits(24, 4, 4, 60, 16, kinds=(KVKind(4, Reach(9)),)),
}


WITH_STATE = {"a": replace(PLAIN["a"], has_state=True), "b": replace(WINDOWED["b"], has_state=True)}
SAVING = {worker: replace(limits, num_saved_states=3) for worker, limits in WITH_STATE.items()}


@pytest.mark.parametrize(
    ("seed", "window", "caching", "limits"),
    [
        (1, 1, True, PLAIN),
        (2, 2, True, PLAIN),
        (3, 3, False, PLAIN),
        (4, 4, True, PLAIN),
        (5, 2, True, WINDOWED),
        (6, 4, True, WINDOWED),
        (7, 1, False, WINDOWED),
        (8, 3, True, WITH_STATE),
        (9, 2, True, SAVING),
        (10, 4, True, SAVING),
    ],
)
def test_nothing_leaks_after_ten_thousand_operations(
    seed: int, window: int, caching: bool, limits: dict[str, WorkerLimits]
) -> None:
    dice = random.Random(seed)
    scheduling = Scheduling(
        limits,
        plans_in_flight=window,
        max_num_batched_tokens=16,
        enable_prefix_caching=caching,
        min_saved_tokens=4,
        tolerance=Tolerance(num_tokens=4),
    )
    num_requests = 0
    for _ in range(10_000):
        worker_id = dice.choice(WORKERS)
        match dice.choices(
            ("add", "schedule", "complete", "cancel", "expire", "lose", "leave"), (3, 8, 8, 1, 0.5, 0.03, 0.03)
        )[0]:
            case "add" if len(scheduling.scheduler.requests) < 20:
                num_requests += 1
                prompt = [1 + position % 3 for position in range(dice.randrange(1, 30))]
                prompt += dice.choices(range(VOCAB), k=dice.randrange(4))
                scheduling.add(
                    make_request(
                        num_requests,
                        prompt,
                        n=dice.choice((1, 1, 2, 4)),
                        max_tokens=dice.randrange(1, 40),
                        eos_token_ids=(EOS,),
                        deadline_ns=scheduling.now_ns + dice.randrange(1, 300) if dice.random() < 0.1 else 0,
                    )
                )
            case "schedule":
                scheduling.schedule(worker_id)
            case "complete":
                scheduling.complete(worker_id)
            case "cancel" if num_requests:
                scheduling.cancel(dice.randrange(max(1, num_requests - 20), num_requests + 1))
            case "expire":
                scheduling.expire(scheduling.now_ns + dice.randrange(5))
            case "lose":
                scheduling.lose_worker(worker_id)
                scheduling.add_worker(worker_id)
            case "leave":
                scheduling.remove_worker(worker_id)
                scheduling.add_worker(worker_id)
    scheduling.run()
    scheduling.assert_nothing_is_left()
    assert scheduling.scheduler.stats().counters.num_preemptions > 0


def test_the_paged_worker_notices_a_block_that_is_reused_too_early() -> None:
    scheduling = Scheduling({"a": WorkerLimits(8, 2, 2, 16)}, plans_in_flight=1)
    scheduling.add(make_request(1, [1, 2, 3], max_tokens=8))
    scheduling.add(make_request(2, [4, 5, 6], max_tokens=8))
    scheduling.step()
    slots = scheduling.paged["a"].slots
    slots[0].tables[0][0] = slots[1].tables[0][0]
    with pytest.raises(AssertionError, match="foreign or missing KV"):
        scheduling.step()


def test_equal_seeds_give_equal_outputs_whatever_runs_beside() -> None:
    outputs = []
    for num_others, window, budget, prefill_only in ((0, 1, 64, 3), (5, 2, 64, 3), (5, 4, 7, 3), (5, 4, 7, 0)):
        scheduling = Scheduling(
            {"a": WorkerLimits(16, 2, 4, 24)},
            plans_in_flight=window,
            max_num_batched_tokens=budget,
            max_prefill_only_steps=prefill_only,
        )
        for number in range(2, 2 + num_others):
            scheduling.add(make_request(number, list(range(number)), max_tokens=9))
        scheduling.add(make_request(1, [3, 1, 2], max_tokens=12))
        scheduling.run()
        outputs.append(scheduling.output(1))
    assert outputs[0] == outputs[1] == outputs[2] == outputs[3]
    assert np.unique(outputs[0]).size > 1
