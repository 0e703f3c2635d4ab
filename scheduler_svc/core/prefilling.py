"""The prompts that a plan computes: those that have begun, then those that wait.

Sequences that decode take room in each step, and time. In a burst of prompts a few steps do without them: steps with
prompts only, which are rationed, so that fewer than one in a hundred of the gaps between tokens become longer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.ordered_queue import OrderedQueue
from scheduler_svc.core.plan_draft import PlanDraft
from scheduler_svc.core.policy import Policy, WaitingQueue
from scheduler_svc.core.requests import Requests
from scheduler_svc.core.reuse import belongs_elsewhere, reusable
from scheduler_svc.core.saved_states import save_points
from scheduler_svc.core.sequence import SequenceState
from scheduler_svc.core.stats import Counters
from scheduler_svc.core.tables import Reused
from scheduler_svc.core.worker import I64, WorkerState

_MAX_PASSED_OVER = 16  # waiting sequences that a worker may pass over in one plan
_NEARLY_FULL = 16  # a worker of whose slots fewer than one in so many is free
_FEW = 64  # sequences that decode and take less than one in so many of a step's tokens: to leave them out gains nothing
_PassedOver = list[tuple[Any, SequenceState]]


@dataclass(frozen=True, slots=True)
class Prefilling:
    """Fills plans with prompts. All of its fields are the scheduler's own."""

    config: SchedulerConfig
    policy: Policy
    requests: Requests
    workers: Mapping[str, WorkerState]
    counters: Counters

    def fill(self, worker: WorkerState, budget: int, draft: PlanDraft, decoding: I64, now_ns: int) -> I64:
        """Plan `budget` tokens of prompts beside the slots `decoding` i64[n]; returns those of them that stay: all, or
        in a burst of prompts, which get their tokens, none."""
        passed_over: _PassedOver = []
        budget = self._go_on(worker, budget, draft)
        waiting = self._queue(worker, draft, len(decoding))
        budget = self._admit(worker, waiting, passed_over, budget, draft, now_ns)
        is_prefill_only = budget == 0 and self._is_burst(worker, waiting, draft, decoding)
        if is_prefill_only:
            budget = self._go_on(worker, len(decoding), draft)
            budget = self._admit(worker, waiting, passed_over, budget, draft, now_ns)
            is_prefill_only = budget < len(decoding)
        for key, sequence in passed_over:
            waiting.push(key, sequence)
        if is_prefill_only:
            self.counters.num_prefill_only_steps += 1
        if len(decoding) or draft.chunks:
            worker.prefill_only.count(is_prefill_only=is_prefill_only)
        return decoding[:0] if is_prefill_only else decoding

    def _is_burst(self, worker: WorkerState, waiting: WaitingQueue, draft: PlanDraft, decoding: I64) -> bool:
        """Return whether a plan whose budget is used up is to have prompts only: it has some, half as many tokens as it
        has wait beyond it, and who decodes is not more urgent than they are.
        """
        has_prompts = sum(draft.chunks.values()) > len(draft.chunks)  # beams that go on have one token each
        are_few = len(decoding) * _FEW < worker.max_num_batched_tokens
        if not has_prompts or are_few or draft.has_preempted:
            return False
        may_go_on = worker.prefill_only.may_go_on(self.config.max_prefill_only_steps)
        if not may_go_on or not _waits(worker, waiting, (worker.max_num_batched_tokens + 1) // 2):
            return False
        urgent = min(worker.sequence_in(slot).request.queued.priority for slot in decoding.tolist())
        return all(sequence.request.queued.priority <= urgent for sequence in draft.chunks)

    def _go_on(self, worker: WorkerState, budget: int, draft: PlanDraft) -> int:
        """Plan more of the prompts that have begun; returns what is left of the budget."""
        for sequence in list(worker.prefilling):
            budget -= draft.advance(worker, sequence, budget)
        return budget

    def _queue(self, worker: WorkerState, draft: PlanDraft, num_decoding: int) -> WaitingQueue:
        """The sequences that may begin in this plan."""
        may_begin = not draft.has_preempted and (draft.chunks or not num_decoding or self._may_begin(worker))
        if not may_begin or not len(self.requests.waiting):
            return OrderedQueue()
        return self.requests.waiting.for_worker(worker, self.workers)

    def _may_begin(self, worker: WorkerState) -> bool:
        """Return whether this plan may begin prompts beside sequences that decode.

        A step that does both is dear, however short the prompts. On a worker that is nearly full, whose slots come free
        one by one, some steps in between only decode.
        """
        is_nearly_full = len(worker.free_slots) * _NEARLY_FULL < worker.limits.max_num_seqs
        return not is_nearly_full or worker.num_plain_plans + 1 >= self.config.admit_every

    def _admit(  # noqa: PLR0917
        self,
        worker: WorkerState,
        waiting: WaitingQueue,
        passed_over: _PassedOver,
        budget: int,
        draft: PlanDraft,
        now_ns: int,
    ) -> int:
        """Start waiting sequences in the policy's order while there are slots, blocks and budget; what is left of it.

        The first that lacks blocks, or budget to be computed whole, ends it: none is overtaken for being long. Those
        that this worker can never hold or are better off elsewhere are passed over; another model's leave the queue.
        """
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
        if reused.state is not None:
            worker.states.use(reused.state)
        if worker.limits.num_saved_states and self.config.enable_prefix_caching:
            sequence.save_at = save_points(
                num_tokens=request.num_prompt_tokens,
                num_begun=reused.num_tokens,
                num_found=reused.num_found,
                step=worker.rules.largest_block,
                least=self.config.min_saved_tokens,
            )
        if is_first:
            worker.num_cached_tokens[slot] = reused.num_tokens
            self.counters.num_prompt_tokens += request.num_prompt_tokens
            self.counters.num_cached_tokens += reused.num_tokens
            self.counters.queue_time.observe(max(0, now_ns - request.added_ns) * 1e-9)
        draft.admit(sequence, reused)


def _waits(worker: WorkerState, waiting: WaitingQueue, num_tokens: int) -> bool:
    """Return whether at least so many tokens wait for a worker that are not planned: of prompts that have begun, and,
    if it has room, of those that have not."""
    num_tokens -= worker.num_left_to_prefill()
    for sequence in waiting if worker.has_slot and worker.has_room else ():
        if num_tokens <= 0:
            break
        num_tokens -= sequence.num_tokens if worker.holds(sequence) else 0
    return num_tokens <= 0
