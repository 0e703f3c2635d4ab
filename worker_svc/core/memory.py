"""How many KV blocks fit, and whether that is enough."""

from dataclasses import dataclass

from penstock.domain.errors import invalid

DEFAULT_CPU_KV_CACHE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """Where a rank's memory goes, in bytes."""

    total_bytes: int  # of the device; 0 where it is the host's
    weights_bytes: int
    activation_bytes: int  # the peak of a full step beyond the weights; 0 where it was not measured
    kv_cache_bytes: int
    block_bytes: int
    num_blocks: int


def num_blocks_in(kv_bytes: int, block_bytes: int, max_num_seqs: int, max_model_len: int, block_size: int) -> int:
    """Blocks that `kv_bytes` hold, but no more than all slots together could fill."""
    return min(max(0, kv_bytes) // block_bytes, max_num_seqs * -(-max_model_len // block_size))


def fit_model_len(max_model_len: int, num_blocks: int, block_size: int, block_bytes: int, *, explicit: bool) -> int:
    """The context length that `num_blocks` allow: what was asked for explicitly, or else at most what one sequence can
    have with all blocks for itself.

    Raises:
        PenstockError: INVALID_ARGUMENT saying how much is missing: not one sequence of that length fits.
    """
    capacity = num_blocks * block_size
    if capacity >= max_model_len:
        return max_model_len
    if explicit or num_blocks < 1:
        needed = -(-max_model_len // block_size) * block_bytes
        missing = needed - num_blocks * block_bytes
        raise invalid(
            f"one sequence of max_model_len {max_model_len} tokens needs {_mib(needed)} of KV cache, {_mib(missing)} "
            "more than there is: lower max_model_len, or raise kv_cache_memory_bytes (on a CPU) or "
            "gpu_memory_utilization (on CUDA)",
            "max_model_len",
        )
    return capacity


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
