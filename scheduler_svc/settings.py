"""Settings of a scheduler."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

import msgspec

from scheduler_svc.core.config import SHORT_STEP_US, SchedulerConfig
from scheduler_svc.core.isolation import Tolerance
from servicekit.settings import POLLING_CORES, ServiceSettings, num_cores

BUSY_POLL_US = 500  # steps of half a millisecond leave no time for a wake-up

_WEIGHT = r"=(?=.*[1-9])[0-9]{1,9}(\.[0-9]{1,9})?$"  # above 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings(ServiceSettings):
    """Settings of `scheduler_svc`."""

    scheduling_policy: Literal["fcfs", "priority", "fair"] = field(
        default="fcfs",
        metadata={
            "help": "who is served first: by arrival; by priority, then arrival; by priority, then tenants' shares"
        },
    )
    tenant_weights: tuple[Annotated[str, msgspec.Meta(pattern=_WEIGHT)], ...] = field(
        default=(),
        metadata={"help": "shares of tenants under the scheduling policy fair, as name=2,other=0.5; 1 unless named"},
    )
    plans_in_flight: Annotated[int, msgspec.Meta(ge=1, le=64)] = field(
        default=2, metadata={"help": "steps of a worker that are planned before their results come"}
    )
    short_step_us: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = field(
        default=SHORT_STEP_US, metadata={"help": "microseconds: one plan more is in flight while steps take less"}
    )
    max_num_batched_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = field(
        default=None,
        metadata={
            "help": "tokens of one step: decoding sequences first, then chunks of prompts; none: what its worker chose"
        },
    )
    enable_prefix_caching: bool = field(
        default=True, metadata={"help": "find the KV of equal prefixes again instead of computing it"}
    )
    share_prefixes_between_tenants: bool = field(
        default=False,
        metadata={
            "help": "find cached prefixes of other tenants too: saves computing, but a tenant learns what others have "
            "asked by `cached_tokens` and by how soon a first token comes"
        },
    )
    min_saved_tokens: Annotated[int, msgspec.Meta(ge=1, lt=2**31)] = field(
        default=256,
        metadata={
            "help": "where layers keep a state of each sequence: tokens that a saved one must save whoever begins with "
            "it, since to save it takes a step of its own"
        },
    )
    admit_every: Annotated[int, msgspec.Meta(ge=1)] = field(
        default=1,
        metadata={
            "help": "while fewer than a sixteenth of a worker's slots are free, one plan in so many begins prompts"
        },
    )
    max_prefill_only_steps: Annotated[int, msgspec.Meta(ge=0)] = field(
        default=3,
        metadata={
            "help": "steps in a row that may have prompts only, while what decodes waits: in a burst, if prompts fill "
            "a step and half as much again waits, and in about one step of 128 at most; 0: none"
        },
    )
    max_waiting_seqs: Annotated[int, msgspec.Meta(ge=1)] = field(
        default=1024, metadata={"help": "sequences that may wait here before no more requests are claimed"}
    )
    max_strikes: Annotated[int, msgspec.Meta(ge=1)] = field(
        default=2,
        metadata={"help": "workers that may die while they compute a request among others: then it runs alone"},
    )
    max_strikes_alone: Annotated[int, msgspec.Meta(ge=1)] = field(
        default=2, metadata={"help": "workers that may die while it runs alone: then it ends with an error"}
    )
    forgiven_after_tokens: Annotated[int, msgspec.Meta(ge=1)] = field(
        default=128,
        metadata={"help": "output tokens of each sequence since the last such death after which none counts any more"},
    )
    max_log_backlog: Annotated[int, msgspec.Meta(ge=1)] = field(
        default=16_384,
        metadata={"help": "entries that a detokenizer may be behind; beyond it no steps are planned that write more"},
    )
    model_gone_s: Annotated[float, msgspec.Meta(ge=1)] = field(
        default=600.0,
        metadata={
            "help": "seconds without a worker of the model that a request began on, while workers of another are "
            "there, after which the request ends with an error"
        },
    )
    busy_poll_us: Annotated[int, msgspec.Meta(ge=0, le=100_000)] = field(
        default_factory=lambda: BUSY_POLL_US if num_cores() >= POLLING_CORES else 0,
        metadata={"help": "microseconds for which a result is looked for before sleeping: saves a wake-up each step"},
    )

    @property
    def scheduling(self) -> SchedulerConfig:
        """The core's part."""
        weights = (entry.rpartition("=") for entry in self.tenant_weights)
        return SchedulerConfig(
            scheduling_policy=self.scheduling_policy,
            plans_in_flight=self.plans_in_flight,
            short_step_us=self.short_step_us,
            max_num_batched_tokens=self.max_num_batched_tokens,
            enable_prefix_caching=self.enable_prefix_caching,
            share_prefixes_between_tenants=self.share_prefixes_between_tenants,
            max_waiting_seqs=self.max_waiting_seqs,
            min_saved_tokens=self.min_saved_tokens,
            admit_every=self.admit_every,
            max_prefill_only_steps=self.max_prefill_only_steps,
            tenant_weights={tenant: float(weight) for tenant, _, weight in weights},
            tolerance=Tolerance(self.max_strikes, self.max_strikes_alone, self.forgiven_after_tokens),
        )
