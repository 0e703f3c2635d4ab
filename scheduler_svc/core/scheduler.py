"""Continuous batching over paged KV blocks.

One idea: a sequence has `num_tokens` tokens, of which the KV of `num_computed_tokens` is computed, and every step moves
the second number towards the first. Prefill in chunks, decoding, prefix-cache hits and recompute after a preemption are
the same thing.
(Iteration-level scheduling after Yu et al., "Orca", 2022; chunked prefill after Agrawal et al., "Sarathi-Serve", 2024.)
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from contract.domain.finish import CancelReason, FinishReason
from contract.domain.plan import StepPlan, StepResult
from contract.domain.rows import TokenRows
from contract.domain.timeline import StartReason
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.early_cancels import EarlyCancel, EarlyCancels
from scheduler_svc.core.integrity import check_integrity
from scheduler_svc.core.introspection import RequestInfo, SequenceInfo, describe_request, describe_sequences
from scheduler_svc.core.limits import WorkerLimits
from scheduler_svc.core.plan_draft import PlanDraft
from scheduler_svc.core.policy import POLICIES
from scheduler_svc.core.prefilling import Prefilling
from scheduler_svc.core.requests import Requests
from scheduler_svc.core.rows import (
    NO_ROWS,
    SequenceEnd,
    abandoned,
    cancelled,
    end_rows,
    ended_by_strikes,
    ended_by_tokens,
    failed,
    joined,
    token_rows,
    unholdable,
)
from scheduler_svc.core.searching import NOTHING, fork, take, together, whole
from scheduler_svc.core.sequence import QueuedRequest, ScheduledRequest, Status
from scheduler_svc.core.stats import Counters, SchedulerStats
from scheduler_svc.core.worker import I64, WorkerState


class Scheduler:
    """Plans the steps of several workers for one queue of requests. Methods change state and return the effects."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.policy = POLICIES[config.scheduling_policy](config.tenant_weights)
        self.workers: dict[str, WorkerState] = {}
        self.requests = Requests(self.policy, config.tolerance)
        self.waiting = self.requests.waiting
        self._early_cancels = EarlyCancels()
        self._counters = Counters()
        self._prefilling = Prefilling(config, self.policy, self.requests, self.workers, self._counters)

    # Workers.

    def add_worker(self, worker_id: str, limits: WorkerLimits, model_digest: bytes = b"") -> TokenRows:
        """Begin an epoch with a worker whose slots and blocks are empty; the ends of what no worker can hold."""
        if worker_id in self.workers:
            raise ValueError(f"worker {worker_id} is there already: remove it first")
        budget = min(limits.max_num_batched_tokens, self.config.max_num_batched_tokens or limits.max_num_batched_tokens)
        limits = replace(limits, max_num_batched_tokens=budget, max_plans=self.config.plans_in_flight + 1)
        self.workers[worker_id] = WorkerState(worker_id, limits, budget, model_digest)
        idle = [s for r in self.requests.values() for s in r.sequences if s.status in (Status.WAITING, Status.HELD)]
        return self._end([end for sequence in idle if (end := unholdable(sequence, self.workers))])

    def remove_worker(self, worker_id: str) -> None:
        """End a worker's epoch: its sequences wait again with all their known tokens, in front of those not started."""
        worker = self.workers.pop(worker_id)
        self.waiting.remove_worker(worker_id)
        for sequence in list(worker.running()):
            worker.vacate(sequence)
            sequence.start_reason = StartReason.WORKER_LOST
            self.requests.wait(sequence)

    def strike(self, worker_id: str) -> tuple[list[ScheduledRequest], TokenRows]:
        """Count the death of a worker against what it was computing, which may be the reason; then `remove_worker`.

        Returns the requests that got a strike, and the ends of those that are not tried again.
        """
        worker = self.workers[worker_id]
        struck = list(dict.fromkeys(sequence.request for sequence in worker.running())) if worker.in_flight else []
        for request in struck:
            self.config.tolerance.strike(request)
        ends = [end for request in struck for end in self._sentence(request)]
        return struck, self._end(ends)

    # Models.

    @property
    def models(self) -> Mapping[bytes, int]:
        """The requests that began on a model and must go on with it, by its digest."""
        return self.requests.models

    def abandon(self, model_digest: bytes, gone_s: float) -> TokenRows:
        """End the requests that began on a model which has had no worker anywhere for `gone_s`. Returns their ends."""
        ids = self.requests.of_model(model_digest)
        return self._end([abandoned(sequence, gone_s) for each in ids for sequence in self.requests[each].sequences])

    def hand_over(self, request_ids: Iterable[bytes]) -> None:
        """Let go of requests, none of which runs: another scheduler goes on with them."""
        for request in [self.requests[each] for each in request_ids]:
            for sequence in request.sequences:
                self.waiting.discard(sequence)
            self.requests.close(request)

    # Requests.

    def has_room(self) -> bool:
        """Return whether more requests should be claimed."""
        return len(self.waiting) - self.waiting.num_of_other_models < self.config.max_waiting_seqs

    def add(self, request: QueuedRequest, now_ns: int) -> TokenRows:
        """Queue a request; one that is here already is left alone. Returns the rows that end it at once, if any do."""
        if request.request_id in self.requests:
            return NO_ROWS
        state = self.requests.open(request, now_ns, shares_prefixes=self.config.share_prefixes_between_tenants)
        ends = []
        for sequence in state.sequences:
            if state.has_ended_before(sequence.index):
                ends.append(cancelled(sequence, CancelReason.STOP))
            elif self.config.tolerance.is_at_fault(state):
                ends.append(ended_by_strikes(sequence, self.config.tolerance.num_strikes_alone))
            elif end := ended_by_tokens(sequence) or unholdable(sequence, self.workers):
                ends.append(end)
            elif sequence.index >= state.num_at_first:
                sequence.status = Status.HELD
            else:
                self.requests.wait(sequence)
        for cancel in self._early_cancels.take(request.request_id):
            ends += self._cancelled(request.request_id, cancel.reason, cancel.sequence)
        if 0 < request.deadline_ns <= now_ns:
            ends += self._cancelled(request.request_id, CancelReason.DEADLINE)
        return self._end(ends)

    def cancel(self, request_id: bytes, reason: CancelReason, now_ns: int, sequence: int | None = None) -> TokenRows:
        """End a request or one of its sequences; what it holds is free at once. Returns its last rows.

        A cancel that comes before its request is remembered for a minute.
        """
        if request_id in self.requests:
            return self._end(self._cancelled(request_id, reason, sequence))
        self._early_cancels.note(request_id, EarlyCancel(reason, sequence, now_ns))
        return NO_ROWS

    def expire(self, now_ns: int) -> TokenRows:
        """End the requests whose deadline has passed, and forget old cancels of unknown requests."""
        self._early_cancels.expire(now_ns)
        ends: list[SequenceEnd] = []
        for request_id in self.requests.take_late(now_ns):
            ends += self._cancelled(request_id, CancelReason.DEADLINE)
        return self._end(ends)

    # Steps.

    def may_plan(self, worker_id: str) -> bool:
        """Return whether there is room in the worker's window."""
        worker = self.workers[worker_id]
        return len(worker.in_flight) < self._window(worker)

    def schedule(self, worker_id: str, now_ns: int) -> StepPlan | None:
        """The worker's next plan; None while its window is full or there is nothing to compute."""
        if not self.may_plan(worker_id):
            return None
        worker = self.workers[worker_id]
        draft = PlanDraft()
        decoding = self._give_blocks(worker, draft)
        budget = fork(worker, self.requests, draft, worker.max_num_batched_tokens - len(decoding))
        decoding = self._prefilling.fill(worker, budget, draft, decoding, now_ns)
        draft.let_go(worker)
        if not len(decoding) and not draft.chunks:
            return None
        return self._issue(worker, decoding, draft, now_ns)

    def apply(self, worker_id: str, result: StepResult, now_ns: int) -> TokenRows:
        """Take in what a step produced and return the rows for the log; a step that was applied before gives none.

        Raises:
            StepError: the result contradicts the plans in flight.
        """
        worker = self.workers[worker_id]
        valid = worker.settle(result, now_ns)
        if valid is None:
            return NO_ROWS
        ends = [failed(worker.sequence_in(slot), why) for slot, why in worker.failures(result, valid)]
        beams = take(worker, self.requests, result, valid) if worker.special_slots else NOTHING
        rows, slots = token_rows(worker, result, valid)
        for row in rows.starts:
            if (sequence := worker.sequence_in(int(slots[row]))).gives_prompt_logprobs:
                sequence.request.needs_prompt_logprobs = False
        self.policy.charge(zip(map(worker.sequence_in, slots.tolist()), rows.counts.tolist(), strict=True))
        if beams.sequences:
            self.policy.charge((sequence, 1) for sequence in beams.sequences)
        num_taken = len(rows.token_ids) + len(beams.sequences)
        self._counters.num_generated_tokens += num_taken
        self._counters.num_discarded_tokens += len(result.token_ids) - num_taken
        if self.config.enable_prefix_caching:
            # The newest token's KV may not be planned yet, so a block counts as full one token late.
            num_full = (worker.num_received_tokens[slots] - 1) // worker.limits.block_size
            for slot in slots[num_full > worker.num_registered_blocks[slots]].tolist():
                worker.register_blocks(worker.sequence_in(slot), int(worker.num_received_tokens[slot]) - 1)
        for row in rows.finishes.nonzero()[0].tolist():
            sequence = worker.sequence_in(int(slots[row]))
            self._finish(SequenceEnd(sequence, FinishReason(rows.finishes[row])))
        return joined(joined(rows, beams.rows), self._end([*ends, *beams.ends]))

    def _give_blocks(self, worker: WorkerState, draft: PlanDraft) -> I64:
        """The slots that decode in this step, each with a block for its next token; preempts while blocks are short."""
        slots = worker.decoding()
        while True:
            lacking = worker.lacking(slots)
            if len(lacking) <= worker.blocks.num_free:
                break
            self._preempt(worker, draft)
            slots = slots[worker.at_tip[slots]]
        draft.append(worker, lacking)
        return slots

    def _preempt(self, worker: WorkerState, draft: PlanDraft) -> None:
        """Take the last by the policy's order out of its slot, to be recomputed later.

        The first by that order is never the victim while others run, and alone it has every block: it progresses.
        """
        victim = max(worker.running(), key=self.policy.key)
        for sequence in together(victim):
            worker.vacate(sequence)
            sequence.start_reason = StartReason.PREEMPTED
            self.requests.wait(sequence)
        draft.has_preempted = True
        victim.request.num_preemptions += 1
        self._counters.num_preemptions += 1

    def _window(self, worker: WorkerState) -> int:
        """Plans that may be in flight: steps that are shorter than the way to the worker and back need one more."""
        return self.config.plans_in_flight + (0 < worker.step_ns < self.config.short_step_us * 1000)

    def _issue(self, worker: WorkerState, decoding: I64, draft: PlanDraft, now_ns: int) -> StepPlan:
        """Make the plan. From here on later plans may read what it computes."""
        worker.num_computed_tokens[decoding] += 1
        worker.num_tokens[decoding] += 1
        draft.save_states(worker)
        plan = draft.plan(worker.last_step + 1, worker.released_slots, decoding)
        tips = [sequence.slot for sequence in draft.chunks if sequence not in worker.prefilling]
        worker.issue(plan, np.concatenate((decoding, np.array(tips, np.int64))) if tips else decoding, now_ns)
        worker.num_plain_plans = 0 if draft.chunks else worker.num_plain_plans + 1
        for sequence in draft.chunks:
            slot = sequence.slot
            num_computed = int(worker.num_computed_tokens[slot])
            if self.config.enable_prefix_caching:
                worker.register_blocks(sequence, min(num_computed, int(worker.num_received_tokens[slot])))
            if num_computed >= sequence.request.num_prompt_tokens:
                sequence.prompt_issued = True
                self.requests.wait_for_slots(sequence.request)
        worker.give_up_blocks(decoding, draft.chunks)
        return plan

    # Ends.

    def _sentence(self, request: ScheduledRequest) -> list[SequenceEnd]:
        """The result of a strike: nothing yet, that the request runs alone, or its end."""
        tolerance = self.config.tolerance
        if tolerance.is_at_fault(request):
            return [ended_by_strikes(sequence, tolerance.num_strikes_alone) for sequence in request.sequences]
        for sequence in request.sequences if tolerance.is_suspect(request) else ():
            if sequence.status is Status.RUNNING:
                self.workers[sequence.worker_id].vacate(sequence)
                sequence.start_reason = StartReason.PREEMPTED
            elif sequence.status is not Status.WAITING:
                continue
            self.waiting.discard(sequence)
            self.requests.wait(sequence)
        return []

    def _cancelled(self, request_id: bytes, reason: CancelReason, index: int | None = None) -> list[SequenceEnd]:
        sequences = self.requests[request_id].sequences
        return [cancelled(sequence, reason) for sequence in sequences if index in (None, sequence.index)]

    def _end(self, ends: list[SequenceEnd]) -> TokenRows:
        """Carry out ends, each sequence's first, and make their rows."""
        if not ends:  # as in nearly every step
            return NO_ROWS
        first = [end for end in whole(ends) if self._finish(end)]
        return end_rows([end for end in first if end.has_row]) if first else NO_ROWS

    def _finish(self, end: SequenceEnd) -> bool:
        """Let go of everything that a sequence has; false if it had ended before."""
        sequence, request = end.sequence, end.sequence.request
        if sequence.status is Status.ENDED:
            return False
        if sequence.status is Status.RUNNING:
            self.workers[sequence.worker_id].vacate(sequence)
        self.waiting.discard(sequence)
        sequence.status = Status.ENDED
        request.num_live -= 1
        if request.num_live == 0:
            self.requests.close(request)
            finished = self._counters.num_finished_requests
            finished[end.outcome] = finished.get(end.outcome, 0) + 1
            return True
        if sequence.index == 0:
            self.requests.wait_for_slots(request)
        self.requests.unpin_if_unbegun(request)
        return True

    # Introspection.

    def stats(self) -> SchedulerStats:
        """A snapshot."""
        num_running = sum(worker.num_running for worker in self.workers.values())
        num_live = sum(request.num_live for request in self.requests.values())
        return SchedulerStats(
            num_waiting_seqs=num_live - num_running,
            num_running_seqs=num_running,
            num_requests=len(self.requests),
            counters=self._counters.copy(),
            workers={worker_id: worker.stats() for worker_id, worker in self.workers.items()},
        )

    def block_table(self, request_id: bytes) -> tuple[SequenceInfo, ...] | None:
        """The places of a request's sequences and the blocks that they hold; None for a request that is not here."""
        request = self.requests.get(request_id)
        return None if request is None else describe_sequences(request, self.workers)

    def list_requests(self) -> list[RequestInfo]:
        """All requests that have not ended, in the order in which they came."""
        return [describe_request(request, self.workers) for request in self.requests.values()]

    def check_integrity(self) -> None:
        """Raise an AssertionError that says where the books do not balance, if they do not."""
        check_integrity(self.workers, self.requests)
