"""The interface of all runners, whether they run a model or only pretend to."""

from dataclasses import dataclass
from typing import Protocol

from contract.domain.errors import ErrorCode, PenstockError
from contract.domain.kv_kinds import KVKind
from contract.domain.model_kind import ModelKind
from contract.domain.plan import StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class Limits:
    """The facts that a scheduler must know to plan for a runner."""

    num_blocks: int  # 0 of a model that keeps no keys and values
    block_size: int  # tokens of a block, of the kind of layers whose blocks have the fewest
    max_num_seqs: int  # slots
    max_model_len: int  # tokens of a sequence, prompt and output
    max_num_batched_tokens: int  # tokens that one step may compute
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()  # of a simulated model: which one ends with
    kinds: tuple[KVKind, ...] = ()  # of a decoder's layers; empty: all see all tokens before them
    model_kind: ModelKind = ModelKind.DECODER
    has_state: bool = False  # layers keep a state in a sequence's slot: blocks alone are of no use to another
    num_saved_states: int = 0  # of those: for sequences that begin with the same tokens, beside the slots' own

    def __post_init__(self) -> None:
        kinds = self.kinds or (KVKind(self.block_size),)
        object.__setattr__(self, "kinds", () if self.model_kind.computes_whole_prompts else kinds)

    @property
    def num_states(self) -> int:
        """Of slots, and after them those that are saved."""
        return self.max_num_seqs + self.num_saved_states

    @property
    def num_pages(self) -> int:
        """Pages of `block_size` tokens in a block, of the kind whose blocks have the most tokens."""
        return max((kind.block_size for kind in self.kinds), default=self.block_size) // self.block_size


class DeviceError(PenstockError):
    """The device failed: nothing can be launched or read any more, the process should end."""

    def __init__(self, step: int, error: BaseException) -> None:
        super().__init__(ErrorCode.INTERNAL, f"the device failed in step {step}: {error}")


class PendingStep(Protocol):
    """A step that was launched."""

    def result(self) -> StepResult:
        """Wait for the device and return what the step produced.

        Raises:
            DeviceError: the runner is of no further use.
        """


class Runner(Protocol):
    """Carries out step plans. `launch` is called from one thread; results may be read from another, in order."""

    @property
    def limits(self) -> Limits:
        """The limits that plans must keep to."""

    def launch(self, plan: StepPlan) -> PendingStep:
        """Start one step after those launched before, without waiting for any of them.

        A plan with step 1 starts from empty slots; what was launched before it still completes.

        Raises:
            PenstockError: INTERNAL, the plan contradicts the slots' state. Only a plan with step 1 mends that.
            DeviceError: the runner is of no further use.
        """

    def close(self) -> None:
        """Give the device's memory back; nothing can be launched afterwards."""


def plan_error(message: str) -> PenstockError:
    """A plan that contradicts what the worker knows: a defect of Penstock, never of a request."""
    return PenstockError(ErrorCode.INTERNAL, f"the step plan is not consistent: {message}")
