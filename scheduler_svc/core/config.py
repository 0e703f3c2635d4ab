"""Settings of the scheduling."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from scheduler_svc.core.isolation import Tolerance
from scheduler_svc.core.policy import POLICIES

SHORT_STEP_US = 1500  # a host that is held up once must not keep a device waiting whose steps are shorter


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Settings of the scheduling; what a worker can hold is in its `WorkerLimits`."""

    scheduling_policy: str = "fcfs"  # a name in `POLICIES`
    plans_in_flight: int = 2  # of a worker: steps that are planned before their results come
    short_step_us: int = 0  # one more is in flight while steps take less, microseconds
    # Of a plan: decoding sequences first, then chunks of prompts; None: as many as a worker's step may have.
    max_num_batched_tokens: int | None = None
    enable_prefix_caching: bool = True
    min_saved_tokens: int = 256  # where layers keep a state: those that a saved one saves whoever begins with it
    share_prefixes_between_tenants: bool = False  # else cached blocks are found by requests of their tenant only
    max_waiting_seqs: int = 1024  # above it `has_room` is false
    admit_every: int = 1  # of a nearly full worker's plans, at most one in so many begins prompts
    max_prefill_only_steps: int = 3  # in a row, in a burst of prompts: what decodes waits meanwhile
    tenant_weights: Mapping[str, float] = field(default_factory=dict)  # for the policy `fair`; 1 where there is none
    tolerance: Tolerance = field(default_factory=Tolerance)  # of requests that kill workers

    def __post_init__(self) -> None:
        if self.scheduling_policy not in POLICIES:
            raise ValueError(f"scheduling_policy must be one of {', '.join(POLICIES)}, got {self.scheduling_policy!r}")
        for name in ("plans_in_flight", "max_num_batched_tokens", "max_waiting_seqs", "admit_every"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.min_saved_tokens < 1:
            raise ValueError(f"min_saved_tokens must be at least 1, got {self.min_saved_tokens}")
        if self.max_prefill_only_steps < 0:
            raise ValueError(f"max_prefill_only_steps must be at least 0, got {self.max_prefill_only_steps}")
        for tenant, weight in self.tenant_weights.items():
            if not 0 < weight < math.inf:
                raise ValueError(f"the weight of tenant {tenant!r} must be above 0 and finite, got {weight}")
