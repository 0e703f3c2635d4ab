"""The number of KV blocks that fit, and what is missing where something does not."""

from collections.abc import Sequence
from dataclasses import dataclass

from contract.domain.errors import PenstockError, invalid
from contract.domain.kv_kinds import KVKind, blocks_of_sequence, longest_sequence

DEFAULT_CPU_KV_CACHE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Budget:
    """The bytes that a rank may use of its device."""

    total_bytes: int  # of the device
    share: float  # of it that may be in use, everything counted
    others_bytes: int = 0  # in use before anything was loaded: other processes, CUDA's own

    @property
    def usable_bytes(self) -> int:
        """For weights, steps, graphs and KV cache; negative where others have more than is left to them."""
        return int(self.total_bytes * self.share) - self.others_bytes

    def check_weights(self, weights_bytes: int) -> None:
        """Before they are allocated.

        Raises:
            PenstockError: INVALID_ARGUMENT saying how much is missing: they do not fit.
        """
        missing = weights_bytes - self.usable_bytes
        if missing > 0:
            raise invalid(
                f"the weights need {_size(weights_bytes)}, {_size(missing)} more than there is: {self.describe()}; "
                "raise gpu_memory_utilization, free the device, or spread the model over more ranks",
                "gpu_memory_utilization",
            )

    def describe(self) -> str:
        """The memory that there is, and who has it."""
        return (
            f"gpu_memory_utilization {self.share:g} of {_size(self.total_bytes)}, less {_size(self.others_bytes)} "
            "that other processes and CUDA itself have"
        )


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """The uses of a rank's memory, in bytes."""

    total_bytes: int  # of the device; 0 where it is the host's
    weights_bytes: int
    activation_bytes: int  # the peak of a full step beyond the weights; 0 where it was not measured
    kv_cache_bytes: int
    block_bytes: int
    num_blocks: int
    graph_bytes: int = 0  # of the recorded steps
    state_bytes: int = 0  # of all slots, in layers that keep a state

    def describe(self) -> str:
        """For people."""
        states = f"states {_size(self.state_bytes)}, " if self.state_bytes else ""
        return (
            f"weights {_size(self.weights_bytes)}, {states}a full step {_size(self.activation_bytes)}, "
            f"graphs {_size(self.graph_bytes)}, KV cache {_size(self.kv_cache_bytes)} ({self.num_blocks} blocks)"
        )


def no_states_to_save(count: int) -> PenstockError:
    """An operator wants states saved of a model that has none."""
    return invalid(
        f"num_saved_states is {count}, but no layer of this model keeps a state: leave it out", "num_saved_states"
    )


def num_blocks_in(kv_bytes: int, block_bytes: int, max_num_seqs: int, blocks_each: int) -> int:
    """Blocks that `kv_bytes` hold, but no more than all slots together could fill with `blocks_each`."""
    return min(max(0, kv_bytes) // block_bytes, max_num_seqs * blocks_each)


def fit_model_len(
    max_model_len: int,
    profile: MemoryProfile,
    kinds: Sequence[KVKind],
    longest_step: int,
    budget: Budget | None,
    *,
    explicit: bool,
) -> int:
    """The context length that the profile's blocks allow: what was asked for explicitly, or else at most what one
    sequence can have with all blocks for itself.

    Args:
        max_model_len: tokens that are asked for.
        profile: with the blocks that there are.
        kinds: of the model's layers.
        longest_step: tokens that a step may compute.
        budget: of a GPU, for the message.
        explicit: the length was asked for by name.

    Raises:
        PenstockError: INVALID_ARGUMENT saying how much is missing: not one sequence of that length fits.
    """
    capacity = longest_sequence(kinds, profile.num_blocks, longest_step, max_model_len)
    if capacity >= max_model_len:
        return max_model_len
    if explicit or capacity < 1:
        needed = blocks_of_sequence(kinds, max_model_len, longest_step) * profile.block_bytes
        missing = needed - profile.num_blocks * profile.block_bytes
        way_out = "raise kv_cache_memory_bytes or num_blocks" if budget is None else "raise gpu_memory_utilization"
        if profile.state_bytes:
            way_out += ", or lower max_num_seqs or num_saved_states, since each has states"
        account = "" if budget is None else f" ({budget.describe()}; {profile.describe()})"
        raise invalid(
            f"one sequence of max_model_len {max_model_len} tokens needs {_size(needed)} of KV cache, {_size(missing)} "
            f"more than there is{account}: lower max_model_len, or {way_out}",
            "max_model_len",
        )
    return capacity


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if abs(num_bytes) >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
