"""The prompts that a plan computes: those that have begun, then those that wait.

In a burst of prompts each step has room for fewer of them by what decodes beside, and takes longer by its attention.
So a few steps leave it out. They are rationed, so that few of the gaps between tokens become longer: what counts there
is the gap that ninety-nine of a hundred do not exceed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.plan_draft import PlanDraft
from scheduler_svc.core.policy import Policy
from scheduler_svc.core.requests import Requests
from scheduler_svc.core.reuse import belongs_elsewhere, reusable
from scheduler_svc.core.sequence import SequenceState
from scheduler_svc.core.stats import Counters
from scheduler_svc.core.tables import Reused
from scheduler_svc.core.worker import WorkerState

_MAX_PASSED_OVER = 16  # waiting sequences that a worker may pass over in one plan
_NEARLY_FULL = 16  # a worker of whose slots fewer than one in so many is free


@dataclass(frozen=True, slots=True)
class Prefilling:
    """Fills plans with prompts. All of its fields are the scheduler's own."""

    config: SchedulerConfig
    policy: Policy
    requests: Requests
    workers: Mapping[str, WorkerState]
    counters: Counters

    def plan(self, worker: WorkerState, budget: int, draft: PlanDraft, num_decoding: int, now_ns: int) -> int:
        """Plan `budget` tokens of prompts beside `num_decoding` sequences that decode; returns what is left of it."""
        for sequence in list(worker.prefilling):
            budget -= draft.advance(worker, sequence, budget)
        may_begin = not draft.has_preempted and (draft.chunks or not num_decoding or self._may_begin(worker))
        if may_begin and len(self.requests.waiting):
            budget = self._admit(worker, budget, draft, now_ns)
        return budget

    def leaves_out(self, worker: WorkerState, budget: int, draft: PlanDraft, num_decoding: int) -> bool:
        """Return whether a plan is to leave out what decodes: prompts have taken all of its budget, and at least as
        many tokens as half a step's wait beyond it."""
        is_full = num_decoding > 0 and budget == 0 and bool(draft.chunks) and not draft.has_preempted
        may = is_full and worker.prefill_only.may_go_on(self.config.max_prefill_only_steps)
        return may and self._waits_beyond(worker, (worker.max_num_batched_tokens + 1) // 2)

    def _waits_beyond(self, worker: WorkerState, num_tokens: int) -> bool:
        """Return whether so many tokens of prompts are not planned."""
        num_tokens -= worker.num_left_to_prefill()
        for sequence in self.requests.waiting.for_worker(worker, self.workers):
            if num_tokens <= 0:
                break
            num_tokens -= sequence.num_tokens
        return num_tokens <= 0

    def _may_begin(self, worker: WorkerState) -> bool:
        """Return whether this plan may begin prompts beside sequences that decode.

        A step that does both is dear, however short the prompts. On a worker that is nearly full, whose slots come free
        one by one, some steps in between only decode.
        """
        is_nearly_full = len(worker.free_slots) * _NEARLY_FULL < worker.limits.max_num_seqs
        return not is_nearly_full or worker.num_plain_plans + 1 >= self.config.admit_every

    def _admit(self, worker: WorkerState, budget: int, draft: PlanDraft, now_ns: int) -> int:
        """Start waiting sequences in the policy's order while there are slots, blocks and budget; what is left of it.

        The first that lacks blocks, or budget to be computed whole, ends it: none is overtaken for being long. Those
        that this worker can never hold or are better off elsewhere are passed over; another model's leave the queue.
        """
        passed_over: list[tuple[Any, SequenceState]] = []
        waiting = self.requests.waiting.for_worker(worker, self.workers)
        workers, has_cache = self.workers.values(), self.config.enable_prefix_caching
        while budget and worker.has_slot and worker.has_room and len(passed_over) < _MAX_PASSED_OVER:
            first = waiting.peek()
            if first is None:
                break
            sequence = first[1]
            if not worker.serves(sequence):
                self.requests.waiting.leave_to_its_model(sequence)
                continue
            if not worker.holds(sequence) or belongs_elsewhere(worker, workers, sequence, has_cache=has_cache):
                waiting.pop()
                passed_over.append(first)
                continue
            reused = reusable(worker, sequence, has_cache=has_cache)
            if not (worker.may_start(sequence, budget) and worker.has_blocks(sequence, reused)):
                break
            waiting.pop()
            self._start(worker, sequence, reused, draft, now_ns)
            budget -= draft.advance(worker, sequence, budget)
        for key, sequence in passed_over:
            waiting.push(key, sequence)
        return budget

    def _start(
        self, worker: WorkerState, sequence: SequenceState, reused: Reused, draft: PlanDraft, now_ns: int
    ) -> None:
        request = sequence.request
        is_first = sequence.index == 0 and not sequence.started
        if not sequence.started:
            self.policy.charge([(sequence, request.num_prompt_tokens - reused.num_tokens)])
        if request.model_digest is None:
            self.requests.pin(request, worker.model_digest)
        slot = worker.place(sequence, reused, now_ns)
        if is_first:
            worker.num_cached_tokens[slot] = reused.num_tokens
            self.counters.num_prompt_tokens += request.num_prompt_tokens
            self.counters.num_cached_tokens += reused.num_tokens
            self.counters.queue_time.observe(max(0, now_ns - request.added_ns) * 1e-9)
        draft.admit(sequence, reused)
