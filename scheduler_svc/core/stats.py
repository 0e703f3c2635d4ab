"""Figures that the scheduler tells of itself."""

from dataclasses import dataclass, field, replace

from contract.domain.histogram import Histogram
from scheduler_svc.core.block_map import BlockShares

# Upper bounds in seconds: 1 ms to 10 min.
QUEUE_BOUNDS_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
    600.0,
)


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """One worker, now."""

    num_slots: int
    num_running_seqs: int
    block_size: int
    num_blocks: int
    num_used_blocks: int
    num_cached_blocks: int  # free, with content that can be found again
    num_free_blocks: int  # those included
    num_saved_states: int  # that there is room for, where layers keep a state
    num_used_states: int  # of these, that stand for a prefix
    num_plans_in_flight: int
    last_step: int  # planned
    batch_num_seqs: int  # of the last plan
    batch_num_tokens: int  # of the last plan
    round_trip_ns: int  # of the last result: from its plan to its coming
    block_shares: BlockShares


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    queue_time: Histogram = field(default_factory=lambda: Histogram(QUEUE_BOUNDS_S))  # seconds until the first slot
    num_preemptions: int = 0
    num_prefill_only_steps: int = 0  # planned without the sequences that decode
    num_prompt_tokens: int = 0  # of admitted requests, each prompt once
    num_cached_tokens: int = 0  # of these, found in the prefix cache
    num_generated_tokens: int = 0
    num_discarded_tokens: int = 0  # sampled for sequences that had ended or were preempted
    num_finished_requests: dict[str, int] = field(default_factory=dict)  # by the outcome of the last sequence

    def copy(self) -> "Counters":
        """One that does not change any more."""
        finished = dict(self.num_finished_requests)
        return replace(self, queue_time=self.queue_time.copy(), num_finished_requests=finished)


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """All workers together."""

    num_waiting_seqs: int
    num_running_seqs: int
    num_requests: int
    counters: Counters
    workers: dict[str, WorkerStats]
